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


def test_filled_in_reverse_order_until_full():
    assert of(make_buckets(parameters(1, 2, 3, 4, 5), size=16)) == [[5], [4], [3, 2], [1]]
    assert of(make_buckets(parameters(1, 2, 3), size=10**6)) == [[3, 2, 1]]
    assert of(make_buckets(parameters(9, 9), size=1)) == [[9], [9]]


def test_frozen_parameters_are_in_none_and_shared_ones_in_one():
    one, frozen = parameters(3, 2)
    frozen.requires_grad_(False)
    assert of(make_buckets([one, frozen, one])) == [[3]]
    assert make_buckets([frozen]) == []


def test_types_do_not_mix():
    single, double = parameters(3), parameters(2, dtype=torch.float64)
    buckets = make_buckets([*single, *double, *parameters(1)])
    assert of(buckets) == [[1], [2], [3]]
    assert [bucket.flat.dtype for bucket in buckets] == [
        torch.float32,
        torch.float64,
        torch.float32,
    ]


def test_padded_with_zeros_to_a_multiple():
    (bucket,) = make_buckets(parameters(3, 4), multiple=4)
    assert len(bucket.flat) == 8
    bucket.flat.fill_(9)
    for parameter in bucket.parameters:
        parameter.grad = torch.ones_like(parameter)
    bucket.take_gradients()
    assert bucket.flat.tolist() == [1] * 7 + [0]


def test_gradients_that_were_kept_are_not_cleared_by_what_is_missing():
    first, second = parameters(2, 3)
    first.grad = torch.tensor([1.0, 2.0])
    bucket = Bucket(0, [first, second], multiple=4)
    bucket.take_gradients()
    bucket.give_gradients()  # and no zero_grad
    first.grad.add_(torch.tensor([1.0, 1.0]))
    bucket.take_gradients()
    assert bucket.flat.tolist() == [2, 3, 0, 0, 0, 0, 0, 0]


def test_gradients_are_copied_in_and_become_parts_and_none_stays_none():
    first, second = parameters(2, 3)
    first.grad = torch.tensor([1.0, 2.0])
    bucket = Bucket(0, [first, second])
    bucket.flat.fill_(9)
    bucket.take_gradients()
    assert bucket.flat.tolist() == [1, 2, 0, 0, 0]
    bucket.flat.mul_(10)
    bucket.give_gradients()
    assert first.grad.tolist() == [10, 20]
    assert second.grad is None


def test_gradients_of_any_layout_keep_their_places():
    square = nn.Parameter(torch.zeros(2, 3))
    square.grad = torch.arange(6.0).view(3, 2).T
    bucket = Bucket(0, [square])
    bucket.take_gradients()
    assert bucket.flat.tolist() == square.grad.reshape(-1).tolist()
    bucket.flat.add_(1)
    bucket.give_gradients()
    assert square.grad.tolist() == [[1, 3, 5], [2, 4, 6]]


def test_weights_are_copied_in_and_back():
    first, second = parameters(2, 3)
    bucket = Bucket(0, [first, second], multiple=4)
    assert bucket.take_weights().tolist() == [0, 1, 0, 1, 2, 0, 0, 0]
    other = torch.full((8,), 5.0)
    bucket.give_weights(other)
    assert first.tolist() == [5, 5]
    assert second.requires_grad
    bucket.give_weights()
    assert second.tolist() == [0, 1, 2]


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TrainingError, match="sparse=False"):
        Bucket(0, [table.weight]).take_gradients()
