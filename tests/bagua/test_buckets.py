"""Buckets: their parameters, and the layout of the flat tensor."""

import pytest
import torch
from torch import nn

from geartrain import TrainingError
from geartrain_bagua.buckets import Bucket, make_buckets


def parameters(*lengths, dtype=torch.float32):
    return [nn.Parameter(torch.arange(n, dtype=dtype)) for n in lengths]


def of(buckets):
    return [[parameter.numel() for parameter in bucket.parameters] for bucket in buckets]


def test_frozen_parameters_are_in_none_and_shared_ones_in_one():
    one, frozen = parameters(3, 2)
    frozen.requires_grad_(False)
    assert of(make_buckets([one, frozen, one])) == [[3]]
    assert make_buckets([frozen]) == []


def test_gradients_of_any_layout_keep_their_places():
    square = nn.Parameter(torch.zeros(2, 3))
    square.grad = torch.arange(6.0).view(3, 2).T
    bucket = Bucket(0, [square])
    bucket.take_gradients()
    assert bucket.flat.tolist() == square.grad.reshape(-1).tolist()
    bucket.flat.add_(1)
    bucket.give_gradients()
    assert square.grad.tolist() == [[1, 3, 5], [2, 4, 6]]


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TrainingError, match="sparse=False"):
        Bucket(0, [table.weight]).take_gradients()
