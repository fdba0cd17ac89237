"""The training loop: ``fit``, ``train_epoch`` and ``train_step``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from geartrain.checkpoint.training_state import random_now, restore_random_state, set_random
from geartrain.data.loaders import close_batches
from geartrain.errors import TrainingError, UsageError, warn
from geartrain.loop.evaluate import evaluate
from geartrain.loop.losses import loss_in, weigh
from geartrain.loop.optimizers import parameters_of, step_schedules, zero_grad
from geartrain.loop.ranks import EpochIsOver
from geartrain.loop.stages import end_all_workers

if TYPE_CHECKING:
    from geartrain.loop.run import Run


def train_step(run: Run, micro_batches: Sequence[Any]) -> None:
    """Take one optimizer step over ``micro_batches``, which are on the device."""
    hooks, size = run.hooks, len(micro_batches)

    def compute_gradients() -> torch.Tensor | None:
        """Compute gradients; return the mean loss, or ``None`` if every batch was skipped."""
        mean_loss = None
        for optimizer in run.optimizers:
            hooks.on_before_zero_grad(run=run, optimizer=optimizer)
            zero_grad(optimizer)
        for i, batch in enumerate(micro_batches):
            if (loss := train_batch(run, batch, i, size)) is not None:
                mean_loss = loss if mean_loss is None else mean_loss + loss
        if mean_loss is not None:
            hooks.reduce_gradients(run=run)
            if run.loop.weights:
                mean_loss = run.loop.weights.divide(mean_loss, size)
            hooks.clip_gradients(run=run)
        return mean_loss

    stepped = step_optimizers(run, compute_gradients)
    if stepped and run.schedulers:
        step_schedules(run, "step", run.step + 1)
    output, batch_idx = run.loop.step_output, run.batch_idx + size - 1
    run.loop.stepped = batch_idx + 1
    hooks.on_train_batch_end(run=run, outputs=output, batch=run.batch, batch_idx=batch_idx)


def train_batch(run: Run, batch: Any, i: int, size: int) -> torch.Tensor | None:
    """Add the gradients of batch ``i`` of a step of ``size``; return its part of the mean loss."""
    hooks, loop, last, batch_idx = run.hooks, run.loop, i == size - 1, run.batch_idx + i
    run.batch = batch
    if -1 in hooks.on_train_batch_start(run=run, batch=batch, batch_idx=batch_idx):
        run.coordinator.end_epoch(run)
    with hooks.micro_step(run=run, first=i == 0, last=last):
        output = hooks.forward(run=run, method="training_step", args=(batch, batch_idx))
        loss = output if isinstance(output, torch.Tensor) else loss_in(run, output)
        if loop.weights is not False:  # None before the first loss
            loss = weigh(run, output, loss, i == 0)
        if loss is not None:
            if size > 1:  # the last step of an epoch may be shorter
                loss = loss / size
            hooks.on_before_backward(run=run, loss=loss)
            run.backward(loss)
            hooks.on_after_backward(run=run)
    loop.step_output = output  # after forward: freeing the last graph costs it 1 µs
    if not last:  # that of the last batch comes after the step
        hooks.on_train_batch_end(run=run, outputs=output, batch=batch, batch_idx=batch_idx)
    return loss if loss is None or size == 1 else loss.detach()


def step_optimizers(run: Run, gradients: Callable[[], torch.Tensor | None]) -> bool:
    """Compute the gradients and step every optimizer; True if one stepped."""
    if run.loop.needs_closure:
        return _closure_step(run, gradients)
    if gradients() is None:
        return False
    stepped = False
    for optimizer in run.optimizers:
        run.hooks.on_before_optimizer_step(run=run, optimizer=optimizer)
        stepped |= run.hooks.optimizer_step(run=run, optimizer=optimizer, closure=None) is not False
    return stepped


class _NothingToStepOn(Exception):
    """Every ``training_step`` of a closure returned ``None``; :func:`_closure_step` catches it."""


def _closure_step(run: Run, gradients: Callable[[], torch.Tensor | None]) -> bool:
    """Step an optimizer that computes the loss several times, as LBFGS; True if it stepped."""
    optimizer = run.optimizers[0]

    @torch.enable_grad()  # an optimizer may step under no_grad
    def closure() -> Any:
        loss = gradients()
        if loss is None:
            raise _NothingToStepOn
        run.hooks.on_before_optimizer_step(run=run, optimizer=optimizer)
        return run.coordinator.mean_loss(run, loss)

    try:
        return run.hooks.optimizer_step(run=run, optimizer=optimizer, closure=closure) is not False
    except _NothingToStepOn:
        return False


def fit(run: Run) -> None:
    """Train until ``max_epochs``, ``max_steps`` or, after the minima, ``should_stop``."""
    hooks, options = run.hooks, run.plan.options
    hooks.on_fit_start(run=run)
    resumed = run.loop.resumed
    if resumed is None and run.stages["validate"].loaders and options.num_sanity_val_steps:
        before, run.stage = random_now(run), "sanity_check"
        hooks.on_sanity_check_start(run=run)
        evaluate(run, "sanity_check")
        hooks.on_sanity_check_end(run=run)
        run.stage = "train"
        end_all_workers(run)  # those that persist would keep the seed that they drew
        set_random(run, before)
    within_epoch = resumed is not None and resumed.batch_idx > 0
    if resumed is not None and not within_epoch and _is_done(run):
        # Nothing is trained; the state is of the end.
        run.stages["train"].set_epoch(run.epoch - 1)
        restore_random_state(run)
    else:
        hooks.on_train_start(run=run)
        run.coordinator.check_agreement(run, begins=True)
        first, began, untrained = run.epoch, run.step, _versions(run)
        while within_epoch or not _is_done(run):
            train_epoch(run)
            if run.epoch == first and run.step > began:  # not resumed at the epoch's end
                _warn_if_untrained(run, untrained)
            run.epoch, within_epoch = run.epoch + 1, False
        hooks.on_train_end(run=run)
    hooks.on_fit_end(run=run)


def _is_done(run: Run) -> bool:
    """True if no epoch is left to begin."""
    options = run.plan.options
    at_end = run.epoch == options.max_epochs or run.step == options.max_steps
    return at_end or (run.logs.stop and _may_stop(run))


def train_epoch(run: Run) -> None:
    """Train for one epoch, with its validation and its metrics."""
    hooks, run.batch_idx, run.loop.stepped, run.logs.open = run.hooks, 0, 0, True
    restore_random_state(run)
    run.stages["train"].set_epoch(run.epoch)
    hooks.on_epoch_start(run=run)
    _train_batches(run)
    step_schedules(run, "epoch", run.epoch + 1)  # before validation, as Lightning does
    if _validates_after_epoch(run):
        _validate(run)
    run.loop.resumed = None
    if hooks.implementers("on_train_epoch_end"):
        run.logs.refresh_epoch()
    hooks.on_train_epoch_end(run=run)
    run.logs.end_epoch()
    run.loop.step_plateaus(run, "epoch")
    with torch.no_grad():
        run.coordinator.broadcast_buffers(run)
    run.coordinator.check_agreement(run)
    run.loop.batches_seen += run.batch_idx
    hooks.on_epoch_end(run=run)


def _train_batches(run: Run) -> None:
    """Make one pass over the training loader, with the validations that are due inside it."""
    hooks, stage, ended = run.hooks, run.stages["train"], False
    loader, limit = stage.loaders[0], stage.batches[0]
    limit = None if limit is None else limit - stage.first
    every, size = _validation_interval(run), run.plan.options.accumulate_grad_batches
    device_batches = hooks.device_batches(run=run, loader=loader, stage="train")
    batches = run.coordinator.batches(run, device_batches, limit)
    try:
        if run.loop.resumed is not None and run.loop.resumed.skip(run, batches):
            ended = _finish_step(run, (run.batch_idx - 1) % size + 1, every)
        step, on_step_end = hooks.step, hooks.on_step_end
        for window in () if ended else _windows(batches, size):
            step(run=run, micro_batches=window)
            run.step, run.batch_idx, run.batch = run.step + 1, run.batch_idx + len(window), None
            on_step_end(run=run)
            if _finish_step(run, len(window), every):
                break
    except EpochIsOver:
        ended = True
    finally:
        run.loop.step_output = run.batch = None
        close_batches(device_batches, loader)
    if run.batch_idx == 0 and not ended:
        message, hint = "gave no batch", "look at its dataset, batch_size and drop_last"
        if isinstance(loader, Iterator) and run.loop.batches_seen:
            message = "is an iterator, which earlier epochs have read to its end"
            hint = "use a DataLoader or a list"
        raise TrainingError(f"the training loader {message}. Fix: {hint}")


def _windows(batches: Iterator[Any], size: int) -> Iterator[Sequence[Any]]:
    """Return batches in windows of ``size``; the last may be shorter.

    All batches of a window are on the device together, because the loss is divided by its length.
    """
    return zip(batches, strict=True) if size == 1 else iter(lambda: list(islice(batches, size)), [])


def _finish_step(run: Run, taken: int, every: int | None) -> bool:
    """Validate and flush if that is due after this step; True if the step ends the epoch.

    Args:
        taken: the batches of the step.
        every: the batches between validations; ``None`` if none is due inside the epoch.
    """
    options = run.plan.options
    flushes = run.step % options.log_every_n_steps == 0
    done = run.batch_idx + (run.loop.batches_seen if options.check_val_every_n_epoch is None else 0)
    validates = every is not None and done // every > (done - taken) // every
    validates = validates or (flushes and _epoch_is_due(run) and run.loop.validation_is_due(run))
    if validates:
        if run.batch_idx == run.stages["train"].batches[0]:
            step_schedules(run, "epoch", run.epoch + 1)
        _validate(run)
    if run.schedulers:
        run.loop.step_plateaus(run, "validation" if validates else "")
    if flushes:
        run.logs.flush()  # the CPU waits for the GPU here
    return run.step == options.max_steps or (run.logs.stop and _may_stop(run))


def _may_stop(run: Run) -> bool:
    """True if ``min_epochs`` and ``min_steps`` are reached; otherwise warn that training continues.

    Every rank has the same counts, and so the same answer.
    """
    epochs, steps = run.plan.options.min_epochs or 0, run.plan.options.min_steps or 0
    if run.epoch >= epochs and run.step >= steps:
        return True
    if run.world.rank == 0:
        warn(f"should_stop waits for min_epochs={epochs} and min_steps={steps}")
    return False


def _validate(run: Run) -> None:
    """Validate, unless that is done here, as before a checkpoint from which the run resumes."""
    if run.loop.validated != (run.epoch, run.batch_idx):
        run.loop.before_validation = random_now(run)
        evaluate(run, "validate")
    run.loop.validated = (run.epoch, run.batch_idx)


def _versions(run: Run) -> list[int]:
    """Return torch's count of in-place changes of each parameter that optimizers step."""
    return [parameter._version for parameter in parameters_of(run.optimizers)]


def _warn_if_untrained(run: Run, versions: list[int]) -> None:
    """Warn if the first epoch changed no parameter and left no gradient to change one with."""
    stepped = parameters_of(run.optimizers)
    if run.mode != "automatic" or not stepped or run.world.rank != 0:
        return
    if versions != _versions(run) or any(p.grad is not None for p in stepped):
        return
    if any(parameter.grad is not None for parameter in run.module.parameters()):
        reason = "gradients reached only parameters that no optimizer steps"
        hint = "give configure_optimizers the parameters of the loss"
    else:
        reason = "every training_step returned None, or a plugin dropped its gradients"
        hint = "return the loss from training_step"
    message = "no step of the first epoch trained anything"
    warn(f"{message}: {reason}. Fix: {hint}")


def _validates_after_epoch(run: Run) -> bool:
    """True if validation comes after this epoch: it is the whole interval, or a plugin asks."""
    interval = run.plan.options.val_check_interval
    is_whole = isinstance(interval, float) and interval == 1.0
    return _epoch_is_due(run) and (is_whole or run.loop.validation_is_due(run))


def _epoch_is_due(run: Run) -> bool:
    every = run.plan.options.check_val_every_n_epoch
    return bool(run.stages["validate"].loaders) and (every is None or (run.epoch + 1) % every == 0)


def _validation_interval(run: Run) -> int | None:
    """Return the batches between validations in this epoch; ``None`` if none is due inside it.

    Raises:
        UsageError: an interval that no epoch reaches, or a fraction of a loader without length.
    """
    interval, total = run.plan.options.val_check_interval, run.stages["train"].batches[0]
    if isinstance(interval, timedelta) or not _epoch_is_due(run):
        return None
    if isinstance(interval, float):
        if interval == 1.0:
            return None
        if total is None:
            message = f"val_check_interval={interval} of a training loader without length"
            raise UsageError(f"{message}. Fix: use a whole number of batches")
        return max(1, int(total * interval))
    counts_each_epoch = run.plan.options.check_val_every_n_epoch is not None
    if counts_each_epoch and total is not None and interval > total:
        raise UsageError(
            f"val_check_interval={interval} is more than the {total} batches of an epoch, so "
            "validation would never run. Fix: use a smaller one, or count across epochs "
            "with check_val_every_n_epoch=None"
        )
    return interval
