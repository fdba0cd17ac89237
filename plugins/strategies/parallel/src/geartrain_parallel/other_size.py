"""Resume a ``fit`` in a world of another size than that in which the checkpoint was saved."""

from __future__ import annotations

from typing import Any

from geartrain import Run
from geartrain.plugin_api import length, warn
from geartrain_parallel.sharding import StridedShard


def position(run: Run, fit: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return this rank's state, and after how many of its batches the epoch resumes.

    The state has the random state, if the rank existed, and rank 0's metrics.

    Args:
        fit: the checkpoint's ``"fit"``.
    """
    ranks, rank = fit["ranks"], run.world.rank
    kept = ranks[rank] if rank < len(ranks) else {}
    logs = {**ranks[0]["logs"], "epoch": None}
    state = {"random": kept.get("random"), "began": kept.get("began"), "logs": logs, "parts": {}}
    seeds = fit["seeds"].get("train", [])
    return state, _batches(run, len(ranks), int(fit["batch_idx"]), seeds)


def _batches(run: Run, before: int, done: int, seeds: list[list[int]]) -> int:
    """Return the position of this rank; let the epoch go on with the samples that are not done."""
    current, stage = run.world.size, run.stages["train"]
    batches, total = done * before // current, stage.batches[0]
    if total is not None:  # shards are padded: the smaller world's epoch may be shorter
        batches = min(batches, total)
    if not done:
        return batches
    loader: Any = stage.loaders[0]
    shard = next((each for each in stage.samplers() if isinstance(each, StridedShard)), None)
    message = f"the checkpoint was saved by {before} ranks after {done} batches of an epoch, which "
    message += f"{current} ranks resume after {batches}: "
    if shard is not None and seeds == stage.seeds() and length(shard.sampler) is not None:
        items = loader.batch_size if loader.sampler is shard else 1
        shard.left_out = {run.epoch: range(batches * current * items, done * before * items)}
        message += "each of its samples comes once"
    else:
        message += "some of its samples may come twice or not at all"
    if run.world.rank == 0:
        warn(f"{message}, and its metrics cover the rest")
    return batches
