"""Uneven inputs: ranks call their steps equally often, so that collectives cannot deadlock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from geartrain import Run, TrainingError
from geartrain.plugin_api import Stage, length, warn

#: Stands for a batch after a rank has run out.
_OUT = object()


def is_sure(loader: Any) -> bool:
    """True if a loader's length is certain; the length of an IterableDataset is an estimate."""
    streams = (
        isinstance(getattr(single_loader, "dataset", None), IterableDataset)
        for single_loader in Stage([loader]).single_loaders()
    )
    return not any(streams) and length(loader) is not None


def until_first_rank_is_done(run: Run, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches to train on until a rank has run out, with one small collective per batch.

    Raises:
        TrainingError: some ranks have no batch at all.
    """
    iterator, is_first = iter(batches), run.batch_idx == 0
    while True:
        batch = next(iterator, _OUT)
        out = _exhausted_ranks(run, batch is _OUT)
        if out:
            if len(out) < run.world.size:
                if is_first:
                    raise TrainingError(
                        f"the training loaders of ranks {out} gave no batch, and the others' did. "
                        "Fix: give each rank at least one batch in each epoch"
                    )
                warn(
                    f"the training loaders of ranks {out} have run out before the others': "
                    "the epoch ends on all ranks"
                )
            return
        yield batch
        is_first = False


def until_all_ranks_are_done(
    run: Run, batches: Iterable[Any], limit: int | None
) -> Iterator[tuple[Any, bool]]:
    """Yield batches to evaluate, with one small collective per batch.

    Each has True if this rank repeats its last batch, because it has used its ``limit`` or has run
    out.

    Raises:
        TrainingError: this rank has no batch to repeat.
    """
    iterator, last, done = islice(batches, None if limit is None else max(limit, 1)), _OUT, 0
    while True:
        batch = next(iterator, _OUT)
        repeats = batch is _OUT or done == limit
        if len(_exhausted_ranks(run, repeats)) == run.world.size:
            return
        last = last if batch is _OUT else batch
        if last is _OUT:
            raise TrainingError(
                f"the {run.stage} loader gives rank {run.world.rank} no batch, and others some. "
                "Fix: give each rank at least one"
            )
        done += 1
        yield last, repeats


def repeated(
    batches: Iterable[Any], limit: int | None, rounds: int | None
) -> Iterator[tuple[Any, bool]]:
    """Yield ``limit`` batches, then the last one again, until there are ``rounds``.

    Each has True if it is repeated.
    """
    if limit == rounds or limit is None or rounds is None:
        yield from ((batch, False) for batch in islice(batches, limit))
        return
    batch, done = None, 0
    for batch in islice(batches, max(limit, 1)):
        done += 1
        yield batch, done > limit
    for _ in range(rounds - done):
        yield batch, True


def _exhausted_ranks(run: Run, out: bool) -> list[int]:
    """Return the ranks that have run out."""
    table = run.hooks.log_sync(run=run, values=torch.tensor([out], dtype=torch.float64))
    return [rank for rank, value in enumerate(table[:, 0].tolist()) if value]
