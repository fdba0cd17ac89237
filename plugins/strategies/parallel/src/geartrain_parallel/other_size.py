"""Resume a ``fit`` with another number of ranks, or with batches of another size, than before."""

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
    ranks, rank = fit["ranks"], run.world.data_rank
    kept = ranks[rank] if rank < len(ranks) else {}
    logs = {**ranks[0]["logs"], "epoch": None}
    state = {"random": kept.get("random"), "began": kept.get("began"), "logs": logs, "parts": {}}
    return state, _batches(run, fit)


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
        warn(f"{message}, and its metrics cover the rest")
    return batches
