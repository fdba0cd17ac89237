"""Resume a ``fit`` with another number of ranks, or with batches of another size, than before."""

from __future__ import annotations

from typing import Any

from geartrain import Run
from geartrain.plugin_api import MetricOptions, length, reductions, warn
from geartrain_parallel.sharding import StridedShard


def position(run: Run, fit: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return this rank's state, and after how many of its batches the epoch resumes.

    The state has the random state, if the rank existed, rank 0's metrics, and the epoch's so far.

    Args:
        fit: the checkpoint's ``"fit"``.
    """
    ranks, rank = fit["ranks"], run.world.data_rank
    kept = ranks[rank] if rank < len(ranks) else {}
    epochs = [state["logs"]["epoch"] for state in ranks]
    logs = {**ranks[0]["logs"], "epoch": _epoch(epochs, rank, run.world.data_size)}
    state = {"random": kept.get("random"), "began": kept.get("began"), "logs": logs, "parts": {}}
    return state, _batches(run, fit)


def _epoch(epochs: list[Any], rank: int, size: int) -> dict[str, Any] | None:
    """Return what a rank has logged in the epoch; ``None`` for a rank that did not exist.

    With ``sync_dist`` the ranks take over the parts of those that no longer exist.

    Args:
        epochs: ``"epoch"`` of ``MetricStore.state_dict`` of each rank of the checkpoint.
        rank: this rank, of ``size``.
    """
    if epochs[0] is None or rank >= len(epochs):
        return None
    merged: dict[str, Any] = {}
    for name, (options, last, *_) in epochs[rank].items():
        spec = MetricOptions(*options)
        sources = epochs[rank :: size if spec.sync_dist else len(epochs)]
        parts = [epoch[name][2:] for epoch in sources if name in epoch]
        total, weight, values = parts[0]
        for more, count, samples in parts[1:]:
            total = reductions.combine(spec.reduce_fx, total, more) if weight else more
            weight, values = weight + count, [*values, *samples]
        merged[name] = [options, last, total, weight, values]
    return merged


def _batches(run: Run, fit: dict[str, Any]) -> int:
    """Return the position of this rank; let the epoch go on with the samples that are not done."""
    before, current, stage = len(fit["ranks"]), run.world.data_size, run.stages["train"]
    loader: Any = stage.loaders[0]
    shard = next((each for each in stage.samplers() if isinstance(each, StridedShard)), None)
    saved_size: int | None = fit["batch_size"]
    size = run.plan.loader_batch_size
    in_order = fit["seeds"].get("train", []) == stage.seeds()
    if size is None or saved_size is None or (shard is not None and loader.sampler is not shard):
        in_order &= saved_size == size
        saved_size = size = 1  # count batches: their size is unknown, or the shard has whole ones
    done = int(fit["batch_idx"]) * before * saved_size
    batches, total = done // (current * size), stage.batches[0]
    if total is not None:  # shards are padded: the smaller world's epoch may be shorter
        batches = min(batches, total)
    if not done:
        return batches
    message = f"the checkpoint was saved by {before} ranks after {fit['batch_idx']} batches of an "
    message += f"epoch, which {current} ranks resume after {batches}: "
    done_again = range(batches * current * size, done)
    if in_order and shard is not None and length(shard.sampler) is not None:
        shard.left_out = {run.epoch: done_again}
        message += "each of its samples comes once"
    elif in_order and before == current and not done_again:
        message += "each of its samples comes once"
    else:
        message += "some of its samples may come twice or not at all"
    if run.world.rank == 0:
        objects = any(any(state["metric_objects"].values()) for state in fit["ranks"])
        warn(f"{message}{', and metric objects cover the rest' if objects else ''}")
    return batches
