"""Predictions are sent from every rank to all ranks."""

import queue
import threading
from types import SimpleNamespace

import pytest
import torch
from small_models import together
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import TrainingError
from geartrain_parallel import predictions
from geartrain_parallel.sharding import StridedShard


def ranks(outputs, loader=None):
    """Return the results of ranks with these outputs, and the numbers of bytes that they sent."""
    mail = [queue.Queue() for _ in outputs]
    sent = []

    def broadcast(rank, obj, src):
        if rank == src:
            sent.append(sum(map(len, obj[0])))
            for other in range(len(outputs)):
                mail[other].put(obj)
        return mail[rank].get()

    def run(rank):
        hooks = SimpleNamespace(broadcast=lambda run, obj, src: broadcast(rank, obj, src))
        return SimpleNamespace(world=gt.World(rank, len(outputs)), hooks=hooks)

    functions = [
        lambda r=r: predictions.from_all_ranks(run(r), outputs[r], loader)
        for r in range(len(outputs))
    ]
    return together(functions), sent


def dealt(n):
    return DataLoader(range(n), batch_sampler=StridedShard([[i] for i in range(n)], 0, 3, False, 0))


def test_batches_in_turn_are_put_back_in_the_loaders_order():
    found, _ = ranks([[0, 3, 6], [1, 4], [None, 5]], dealt(7))
    assert found == [[0, 1, None, 3, 4, 5, 6]] * 3


def test_outputs_of_a_loader_that_is_not_sharded_are_returned_rank_by_rank():
    found, _ = ranks([[0, 1], [2], []], DataLoader(range(2)))
    assert found == [[0, 1, 2]] * 3


def test_many_outputs_are_sent_in_pieces(monkeypatch):
    monkeypatch.setattr(predictions, "_CHUNK", 100)
    found, sent = ranks([["a" * 60] * 3, ["b" * 300] * 2])
    assert found == [["a" * 60] * 3 + ["b" * 300] * 2] * 2
    assert len(sent) == 4


def test_view_of_a_large_tensor_is_sent_without_the_rest():
    found, sent = ranks([[torch.ones(1000, 1000)[:, 0]], []])
    assert torch.equal(found[1][0], torch.ones(1000))
    assert sent[0] < 10_000


def test_output_that_cannot_be_sent_is_named():
    run = SimpleNamespace(world=gt.World(1, 2))
    with pytest.raises(
        TrainingError,
        match=r"rank 1 cannot send.*output 1, of type dict, cannot be pickled \(TypeError: .*lock.*"
        "Fix: return only tensors",
    ):
        next(predictions._pickled(run, [1, {"x": 1, "lock": threading.Lock()}]))
