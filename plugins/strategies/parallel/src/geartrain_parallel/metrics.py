"""Reduce metrics with ``sync_dist`` over all ranks, and agree on the logged objects.

Ranks exchange a header of fixed size (a digest of the metrics, their number, and if this rank wants
to stop), and then one vector.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from geartrain import Run, TrainingError
from geartrain.plugin_api import LocalMetric, MetricOptions, reductions
from geartrain_parallel.collectives import of_data_ranks


def sync(
    run: Run, shares: Mapping[str, LocalMetric]
) -> tuple[dict[str, float], dict[str, MetricOptions], bool]:
    """Reduce metrics over all ranks. All ranks must call it at the same time.

    Args:
        run: this rank's run.
        shares: this rank's metrics, by name.

    Returns:
        Each number's value; each metric's options, which a rank without samples learns here; and
        true if any rank wants to stop.

    Raises:
        TrainingError: ranks with samples have different metrics.
    """
    keys = {name: shares[name].spec for name in sorted(shares)}
    digest = zlib.crc32(repr(list(keys.items())).encode())
    header = run.hooks.log_sync(
        run=run, values=torch.tensor([digest, len(keys), run.should_stop], dtype=torch.float64)
    )
    stop = bool(header[:, 2].any())
    if bool((header[:, :2] != header[0, :2]).any()):
        keys = _agree(run, keys)
    numbers = {name: spec for name, spec in keys.items() if spec.path is None}
    if not numbers:
        return {}, keys, stop
    vector = [
        number
        for name in numbers
        for number in ((shares[name].total, shares[name].weight) if name in shares else (0.0, 0))
    ]
    table = run.hooks.log_sync(run=run, values=torch.tensor(vector, dtype=torch.float64))
    table = of_data_ranks(run, table.tolist())
    values = {
        name: reductions.value(
            spec.reduce_fx, [row[2 * i] for row in table], [row[2 * i + 1] for row in table]
        )
        for i, (name, spec) in enumerate(numbers.items())
    }
    with_functions = [
        name for name, spec in numbers.items() if spec.reduce_fx not in reductions.NAMED
    ]
    return (
        (values | _apply_functions(run, with_functions, shares) if with_functions else values),
        keys,
        stop,
    )


def _apply_functions(
    run: Run, names: list[str], shares: Mapping[str, LocalMetric]
) -> dict[str, float]:
    """Return the results of users' functions on every rank's values, rank by rank."""
    samples = [shares[name].samples if name in shares else [] for name in names]
    own = torch.tensor([len(values) for values in samples], dtype=torch.float64)
    counts = of_data_ranks(run, run.hooks.log_sync(run=run, values=own).long().tolist())
    flat = torch.tensor([value for values in samples for value in values], dtype=torch.float64)
    gathered = run.hooks.all_gather(run=run, tensor=flat)
    ranks = [part.tolist() for part in of_data_ranks(run, gathered)]
    values = []
    for i, name in enumerate(names):
        every = [
            value
            for rank, count in zip(ranks, counts, strict=True)
            for value in rank[sum(count[:i]) : sum(count[: i + 1])]
        ]
        function = shares[name].function if name in shares else None
        # A rank without samples has no function, which may not be picklable. It takes the result of
        # another rank.
        values += [0.0, 0.0] if function is None else [reductions.apply(name, function, every), 1.0]
    table = run.hooks.log_sync(run=run, values=torch.tensor(values, dtype=torch.float64)).tolist()
    return {
        name: next(row[2 * i] for row in table if row[2 * i + 1]) for i, name in enumerate(names)
    }


def _agree(run: Run, keys: dict[str, MetricOptions]) -> dict[str, MetricOptions]:
    """Return the keys to sync if ranks differ.

    A rank without metrics takes those of other ranks. A rank without a batch of a loader takes the
    metrics that it lacks; it may have metrics of ``on_validation_epoch_end`` and of other loaders.
    Any other difference is an error.

    Raises:
        TrainingError: ranks have different metrics, or a rank cannot find an object.
    """
    pairs = [
        run.hooks.broadcast(run=run, obj=(keys, is_idle(run)), src=rank)
        for rank in range(run.world.size)
    ]
    by_rank, idle = [theirs for theirs, _ in pairs], [lacks for _, lacks in pairs]
    first = min((i for i, theirs in enumerate(by_rank) if theirs), key=lambda i: (idle[i], i))
    for rank, theirs in enumerate(by_rank):
        mine, others = {*theirs.items()}, {*by_rank[first].items()}
        odd = sorted(mine - others if idle[rank] or not theirs else mine ^ others, key=str)
        if odd:
            name, spec = odd[0]
            kind, otherwise = "metrics with sync_dist", ", or leave out sync_dist"
            if spec.path is not None:
                kind, otherwise = "metric objects", ""
            raise TrainingError(
                f"ranks {first} and {rank} logged different {kind}: "
                f"{name!r} is not the same on both. "
                f"Fix: log the same names on every rank{otherwise}"
            )
        if lost := [name for name, spec in others - mine if spec.path == ""]:
            raise TrainingError(
                f"self.log({min(lost)!r}): a rank without samples cannot find the metric. "
                "Fix: use an attribute of the module"
            )
    return dict(by_rank[first])


def is_idle(run: Run) -> bool:
    """True if this rank has no batch of the current loader, and so lacks that loader's metrics."""
    return run.stage != "train" and 0 in run.current_stage.batches
