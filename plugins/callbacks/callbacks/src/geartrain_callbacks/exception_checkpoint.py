"""The checkpoint of ``save_on_exception``: rank 0's, because other ranks may have left."""

from __future__ import annotations

from pathlib import Path

import torch

from geartrain import Run
from geartrain.plugin_api import warn
from geartrain_callbacks.saving import of_rank_0
from geartrain_callbacks.shards import is_of_zero, is_sharded
from geartrain_callbacks.stopping import say

#: The file's name.
NAME = "exception.ckpt"
#: The plugin that writes as core does, on rank 0 alone.
_BACKGROUND = "async_checkpoint"


def save(run: Run, path: Path, error: BaseException, weights_only: bool) -> bool:
    """Save rank 0's state after an error, without any collective; True if it was saved.

    Nothing is saved before the first epoch, if the weights have become NaN or infinite, if each
    rank has a part of them, or if the strategy's ranks write checkpoints together.
    """
    if run.world.rank != 0 or run.loop.epoch_start is None:
        return False
    owner = run.hooks.owner("save_checkpoint")
    reason, weights = "", list(run.module.parameters())
    if any(is_sharded(weight) for weight in weights):
        reason = "the weights are sharded"
    elif any(map(is_of_zero, weights)):
        reason = "the optimizer's states are sharded"
    elif not all(bool(torch.isfinite(weight).all()) for weight in weights):
        reason = "the weights are NaN or infinite"
    elif run.world.size > 1 and owner and owner.kind != "default" and owner.name != _BACKGROUND:
        reason = f"all ranks of {owner.label} write a checkpoint together"
    if reason:
        warn(f"geartrain-callbacks[model_checkpoint] saves no {NAME}: {reason}")
        return False
    alone, lost = of_rank_0(run)
    # A validation that failed is not done.
    alone.stage = "train"
    state = alone.checkpoint(alone.epoch, weights_only)
    alone.save_checkpoint(state, path)
    holds = "rank 0's weights and state" if run.world.size > 1 else "weights and state"
    if "fit" not in state:
        holds = f"only the weights{f', because {lost}' if lost and not weights_only else ''}"
    place = f"after {alone.batch_idx} batches of epoch {alone.epoch}"
    say(
        run,
        f"model_checkpoint: {type(error).__name__} ended the fit. Saved {path}: {holds} {place}.",
    )
    return True
