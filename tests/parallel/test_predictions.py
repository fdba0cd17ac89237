"""Predictions are sent from every rank to all ranks; tests/core/ranks has their order."""

import queue
from types import SimpleNamespace

import torch
from small_models import together

import geartrain as gt
from geartrain_parallel import predictions


def ranks(outputs):
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
        size = len(outputs)
        world = gt.World(rank, size, data_rank=rank, data_size=size)
        return SimpleNamespace(world=world, hooks=hooks)

    functions = [
        lambda r=r: predictions.from_all_ranks(run(r), outputs[r], None)
        for r in range(len(outputs))
    ]
    return together(functions), sent


def test_many_outputs_are_sent_in_pieces(monkeypatch):
    monkeypatch.setattr(predictions, "_CHUNK", 100)
    found, sent = ranks([["a" * 60] * 3, ["b" * 300] * 2])
    assert found == [["a" * 60] * 3 + ["b" * 300] * 2] * 2
    assert len(sent) == 4


def test_view_of_a_large_tensor_is_sent_without_the_rest():
    found, sent = ranks([[torch.ones(1000, 1000)[:, 0]], []])
    assert torch.equal(found[1][0], torch.ones(1000))
    assert sent[0] < 10_000
