"""Validation, test and prediction: one pass over each loader, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from geartrain.data.loaders import close_batches
from geartrain.module.nested import map_tensors

if TYPE_CHECKING:
    from torch import nn

    from geartrain.loop.run import Run

#: Stage -> how its step and its hooks of the module begin.
_PREFIX = {
    "validate": "validation",
    "sanity_check": "validation",
    "test": "test",
    "predict": "predict",
}


def evaluate(run: Run, stage: str) -> Any:
    """Run one evaluation and put the stage back as it was.

    Returns:
        For ``"predict"`` each batch's output on the CPU, of all ranks (a list of such lists if there are several loaders); otherwise
        the metrics by name.
    """
    prefix, on = _PREFIX[stage], run.module_hooks
    before, run.stage = (run.stage, run.dataloader_idx), stage
    try:
        with _eval_mode(run.module), torch.no_grad(), run.logs.scope(keep=stage != "sanity_check"):
            run.ranks.broadcast_buffers(run)
            run.hooks.on_validation_start(run=run)
            getattr(on, f"on_{prefix}_start")()
            getattr(on, f"on_{prefix}_epoch_start")()
            outputs = [
                _one_loader(run, index, prefix) for index in range(len(run.current_stage.loaders))
            ]
            if stage == "predict":
                outputs = [
                    run.ranks.outputs(run, mine, loader)
                    for mine, loader in zip(outputs, run.current_stage.loaders, strict=True)
                ]
            collected = outputs[0] if len(outputs) == 1 else outputs
            if on.has(f"{prefix}_epoch_end", f"on_{prefix}_epoch_end"):
                run.logs.refresh_epoch()
            getattr(on, f"{prefix}_epoch_end")(collected)
            getattr(on, f"on_{prefix}_epoch_end")()
            metrics = run.logs.end_epoch()
            getattr(on, f"on_{prefix}_end")()
            run.hooks.on_validation_end(run=run)
    finally:
        run.stage, run.dataloader_idx = before
    return collected if stage == "predict" else metrics


def _one_loader(run: Run, index: int, prefix: str) -> list[Any]:
    """Make one pass over a loader. Return the outputs of its steps, if anything wants them."""
    options, hooks, on, stage = run.plan.options, run.hooks, run.module_hooks, run.current_stage
    run.dataloader_idx, loader = index, stage.loaders[index]
    limit = stage.batches[index]
    if run.stage == "sanity_check" and options.num_sanity_val_steps != -1:
        limit = (
            options.num_sanity_val_steps
            if limit is None
            else min(limit, options.num_sanity_val_steps)
        )
    starts, ends = getattr(on, f"on_{prefix}_batch_start"), getattr(on, f"on_{prefix}_batch_end")
    keeps = run.stage == "predict" or on.has(f"{prefix}_epoch_end")
    more = (index,) if len(stage.loaders) > 1 else ()
    outputs: list[Any] = []
    batches = hooks.device_batches(
        run=run, loader=loader, stage="validate" if run.stage == "sanity_check" else run.stage
    )
    turns = run.ranks.batches(run, batches, limit)
    try:
        for batch_idx, batch in enumerate(turns):
            run.batch = batch
            starts(batch, batch_idx, *more)
            output = hooks.forward(run=run, method=f"{prefix}_step", args=(batch, batch_idx, *more))
            ends(output, batch, batch_idx, *more)
            if keeps and not run.repeating:
                outputs.append(
                    map_tensors(output, torch.Tensor.cpu) if run.stage == "predict" else output
                )
            if (batch_idx + 1) % options.log_every_n_steps == 0:
                run.logs.drain()
    finally:
        close_batches(turns, loader)
        close_batches(batches, loader)
    run.batch = None
    return outputs


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    """``module.eval()``, and afterwards every submodule as it was: frozen parts that were in eval mode stay in it."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
