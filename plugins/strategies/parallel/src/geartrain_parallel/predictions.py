"""Send the outputs of ``predict_step`` from every rank to all ranks."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, zip_longest
from typing import Any

import torch

from geartrain import Run, TrainingError
from geartrain.plugin_api import Stage, map_tensors
from geartrain_parallel.collectives import of_data_ranks

#: Bytes of outputs per broadcast: all outputs of a rank may not fit into a device's free memory.
_CHUNK = 64 * 2**20
_NONE = object()


def from_all_ranks(run: Run, mine: list[Any], loader: Any) -> list[Any]:
    """Return the outputs of all ranks, on every rank.

    They are in the loader's order if ranks had its batches in turn, otherwise rank by rank.

    Raises:
        TrainingError: an output of this rank cannot be pickled.
    """
    ranks: list[list[Any]] = [[] for _ in range(run.world.size)]
    ranks[run.world.rank] = mine
    for rank, outputs in enumerate(ranks):
        chunks = _pickled(run, mine) if rank == run.world.rank else None
        more = True
        while more:
            chunk, more = run.hooks.broadcast(
                run=run, obj=None if chunks is None else next(chunks), src=rank
            )
            if chunks is None:
                outputs += map(pickle.loads, chunk)
    ranks = of_data_ranks(run, ranks)
    if Stage.in_turn(loader) is None:
        return list(chain(*ranks))
    return [
        output
        for turn in zip_longest(*ranks, fillvalue=_NONE)
        for output in turn
        if output is not _NONE
    ]


def _pickled(run: Run, outputs: list[Any]) -> Iterator[tuple[list[bytes], bool]]:
    """Yield pickled outputs in chunks, each with True if another follows."""
    chunk: list[bytes] = []
    size = 0
    for number, output in enumerate(outputs):
        if size >= _CHUNK:
            yield chunk, True
            chunk, size = [], 0
        chunk.append(_pickle(run, number, output))
        size += len(chunk[-1])
    yield chunk, False


def _pickle(run: Run, number: int, output: Any) -> bytes:
    output = map_tensors(output, _without_rest)
    try:
        return pickle.dumps(output, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # a user's __reduce__ or __getstate__ may raise any error
        # Under ddp_spawn this rank has the script's classes from cloudpickle, and only cloudpickle
        # can send them.
        with suppress(Exception):
            return bytes(sys.modules["cloudpickle"].dumps(output))
        raise TrainingError(
            f"rank {run.world.rank} cannot send the results of predict_step to the others: output "
            f"{number}, of type {type(output).__qualname__}, cannot be pickled "
            f"({type(error).__name__}: {error}). Fix: return only tensors, numbers, strings, and "
            "lists, tuples and dicts of them from predict_step"
        ) from error


def _without_rest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the rest of its storage, which pickle would send too."""
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor
