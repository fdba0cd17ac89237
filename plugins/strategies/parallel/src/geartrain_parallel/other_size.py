"""Resume a ``fit`` in a world of another size than that in which the checkpoint was saved."""

from __future__ import annotations

from typing import Any

from geartrain import Run
from geartrain.plugin_api import warn


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
    return state, _batches(run, len(ranks), int(fit["batch_idx"]))


def _batches(run: Run, before: int, done: int) -> int:
    current, total = run.world.size, run.stages["train"].batches[0]
    batches = done * before // current
    if total is not None:  # shards are padded: the smaller world's epoch may be shorter
        batches = min(batches, total)
    if done and run.world.rank == 0:
        warn(
            f"the checkpoint was saved by {before} ranks after {done} batches of an epoch, which "
            f"{current} ranks resume after {batches}: some of its samples may come twice or not at "
            "all, and its metrics cover the rest"
        )
    return batches
