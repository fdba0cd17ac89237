"""Validation, test and prediction: one pass over each loader, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from geartrain.data.loaders import close_batches, describe
from geartrain.errors import TrainingError
from geartrain.module.nested import map_tensors

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: Stages whose methods of the module have another prefix than the stage's name.
_PREFIX = {"validate": "validation", "sanity_check": "validation"}


def evaluate(run: Run, stage: str) -> Any:
    """Run one evaluation and restore ``run.stage``.

    Returns:
        For ``"predict"`` each batch's output on the CPU, of all ranks (a list of such lists if
        there are several loaders; ``None`` if they are not kept); otherwise the metrics by name.
    """
    prefix, on = _PREFIX.get(stage, stage), run.module_hooks
    before, run.stage = (run.stage, run.dataloader_idx), stage
    without_gradients = torch.inference_mode if run.plan.options.inference_mode else torch.no_grad
    try:
        with (
            _eval_mode(run),
            without_gradients(),
            run.logs.scope(keep=stage != "sanity_check"),
        ):
            run.ranks.broadcast_buffers(run)
            run.hooks.on_validation_start(run=run)
            getattr(on, f"on_{prefix}_start")()
            getattr(on, f"on_{prefix}_epoch_start")()
            loaders = run.current_stage.loaders
            outputs = [_one_loader(run, index, prefix) for index in range(len(loaders))]
            returns = stage == "predict" and run.trainer.return_predictions is not False
            if returns:
                pairs = zip(outputs, loaders, strict=True)
                outputs = [run.ranks.outputs(run, mine, loader) for mine, loader in pairs]
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
    return (collected if returns else None) if stage == "predict" else metrics


def _one_loader(run: Run, index: int, prefix: str) -> list[Any]:
    """Make one pass over a loader; return the outputs of its steps, if they are used."""
    options, hooks, on, stage = run.plan.options, run.hooks, run.module_hooks, run.current_stage
    run.dataloader_idx, loader = index, stage.loaders[index]
    limit, sanity = stage.batches[index], options.num_sanity_val_steps
    if run.stage == "sanity_check" and sanity != -1:
        limit = sanity if limit is None else min(limit, sanity)
    starts, ends = getattr(on, f"on_{prefix}_batch_start"), getattr(on, f"on_{prefix}_batch_end")
    returns = run.stage == "predict" and run.trainer.return_predictions is not False
    keeps = returns or on.has(f"{prefix}_epoch_end")
    more = (index,) if len(stage.loaders) > 1 else ()
    outputs: list[Any] = []
    batch_idx, name = -1, "validate" if run.stage == "sanity_check" else run.stage
    batches = hooks.device_batches(run=run, loader=loader, stage=name)
    turns = run.ranks.batches(run, batches, limit)
    try:
        for batch_idx, batch in enumerate(turns):
            run.batch = batch
            starts(batch, batch_idx, *more)
            output = hooks.forward(run=run, method=f"{prefix}_step", args=(batch, batch_idx, *more))
            ends(output, batch, batch_idx, *more)
            if keeps and not run.repeating:
                predicts = run.stage == "predict"
                outputs.append(map_tensors(output, torch.Tensor.cpu) if predicts else output)
            if (batch_idx + 1) % options.log_every_n_steps == 0:
                run.logs.drain()
    finally:
        close_batches(turns, loader)
        close_batches(batches, loader)
    if batch_idx < 0:  # on every rank: one without batches repeats another's sample
        raise TrainingError(
            f"the {name} loader gave no batch: {describe(loader)}. Fix: give it samples; give a "
            "DataLoader or a list instead of an iterator, which can be read once"
        )
    run.batch = None
    return outputs


@contextmanager
def _eval_mode(run: Run) -> Iterator[None]:
    """Set eval mode, and at the end restore the mode of every submodule and wrapper."""
    inside, model = set(run.module.modules()), run.model or run.module
    wrappers = [module for module in model.modules() if module not in inside]
    training = [module for module in (*wrappers, *inside) if module.training]
    run.module.eval()  # which the module may override
    for wrapper in wrappers:
        wrapper.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
