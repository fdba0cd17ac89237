"""Validation, test and prediction: one pass over each loader, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from geartrain.data.loaders import close_batches, describe
from geartrain.errors import TrainingError
from geartrain.module.nested import map_tensors

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: Stage -> the module's method for a batch.
_METHODS = {"validate": "validation_step", "sanity_check": "validation_step"}
_METHODS |= {"test": "test_step", "predict": "predict_step"}


def evaluate(run: Run, stage: str) -> Any:
    """Run one evaluation and restore ``run.stage``.

    Returns:
        For ``"predict"`` each batch's output on the CPU, of all ranks (a list of such lists if
        there are several loaders; ``None`` if they are not kept); otherwise the metrics by name.
    """
    hooks, before, run.stage = run.hooks, (run.stage, run.dataloader_idx), stage
    without_gradients = torch.inference_mode if run.plan.options.inference_mode else torch.no_grad
    try:
        with _eval_mode(run), without_gradients(), run.logs.scope(keep=stage != "sanity_check"):
            run.coordinator.broadcast_buffers(run)
            hooks.on_validation_start(run=run)
            hooks.on_validation_epoch_start(run=run)
            loaders = run.current_stage.loaders
            outputs = [_one_loader(run, index) for index in range(len(loaders))]
            returns = stage == "predict" and run.trainer.return_predictions is not False
            if returns:
                collect = partial(run.coordinator.outputs, run)
                outputs = list(map(collect, outputs, loaders))
            if hooks.implementers("on_validation_epoch_end"):
                run.logs.refresh_epoch()
            hooks.on_validation_epoch_end(run=run)
            metrics = run.logs.end_epoch()
            hooks.on_validation_end(run=run)
    finally:
        run.stage, run.dataloader_idx = before
    if stage != "predict":
        return metrics
    return (outputs[0] if len(outputs) == 1 else outputs) if returns else None


def _one_loader(run: Run, index: int) -> list[Any]:
    """Make one pass over a loader; return the outputs of ``predict_step``, if they are used."""
    options, hooks, stage = run.plan.options, run.hooks, run.current_stage
    run.dataloader_idx, loader = index, stage.loaders[index]
    limit, sanity = stage.batches[index], options.num_sanity_val_steps
    if run.stage == "sanity_check" and sanity != -1:
        limit = sanity if limit is None else min(limit, sanity)
    returns = run.stage == "predict" and run.trainer.return_predictions is not False
    method, more = _METHODS[run.stage], (index,) if len(stage.loaders) > 1 else ()
    outputs: list[Any] = []
    batch_idx, name = -1, "validate" if run.stage == "sanity_check" else run.stage
    batches = hooks.device_batches(run=run, loader=loader, stage=name)
    turns = run.coordinator.batches(run, batches, limit)
    try:
        for batch_idx, batch in enumerate(turns):
            run.batch = batch
            place = {"run": run, "batch": batch, "batch_idx": batch_idx, "dataloader_idx": index}
            hooks.on_validation_batch_start(**place)
            output = hooks.forward(run=run, method=method, args=(batch, batch_idx, *more))
            hooks.on_validation_batch_end(outputs=output, **place)
            if returns and not run.repeating:
                outputs.append(map_tensors(output, torch.Tensor.cpu))
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
