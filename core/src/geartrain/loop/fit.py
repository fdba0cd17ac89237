"""The loop. ``train_step`` is the training step; ``train_epoch`` and ``fit`` are what surrounds it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from geartrain.checkpoint.training_state import begin_epoch
from geartrain.data.loaders import close_batches
from geartrain.data.sharding import set_epoch
from geartrain.data.uneven_inputs import until_first_rank_is_done
from geartrain.errors import TrainingError, UsageError
from geartrain.hooks.manager import fire
from geartrain.loop.evaluate import broadcast_buffers, evaluate
from geartrain.loop.optimizers import mean_over_ranks, parameters_of, step_plateaus, step_schedules, zero_grad
from geartrain.module.nested import map_tensors

if TYPE_CHECKING:
    from geartrain.loop.run import Run
    from geartrain.loop.step_forwarder import ModuleHooks


def train_step(run: Run, micro_batches: Sequence[Any]) -> None:
    """One optimizer step over ``micro_batches``, which are on the device."""
    hooks, on, stepped = run.hooks, run.module_hooks if run.module_hooks.in_step else None, False
    if run.closure:
        stepped = _closure_step(run, micro_batches)
    elif gradients(run, micro_batches) is not None:
        for optimizer in run.optimizers:
            if on is not None and on.on_before_optimizer_step is not None:
                on.on_before_optimizer_step(optimizer)
            stepped |= hooks.optimizer_step(run=run, optimizer=optimizer, closure=None) is not False
    if stepped and run.schedulers:
        step_schedules(run, "step", run.step + 1)
    if on is not None and on.on_train_batch_end is not None:
        on.on_train_batch_end(without_graph(run.step_output), run.batch, run.batch_idx + len(micro_batches) - 1)


class _NothingToStepOn(Exception):
    """Every ``training_step`` of a closure returned ``None``; nobody outside this file sees it."""


def _closure_step(run: Run, micro_batches: Sequence[Any]) -> bool:
    """The step of an optimizer that computes the loss itself, several times, as LBFGS does. Returns whether it stepped."""
    optimizer, before = run.optimizers[0], run.module_hooks.on_before_optimizer_step

    def closure() -> Any:
        loss = gradients(run, micro_batches)
        if loss is None:
            raise _NothingToStepOn
        if before is not None:
            before(optimizer)
        return mean_over_ranks(run, loss)

    try:
        return run.hooks.optimizer_step(run=run, optimizer=optimizer, closure=closure) is not False
    except _NothingToStepOn:
        return False


def gradients(run: Run, micro_batches: Sequence[Any]) -> torch.Tensor | None:
    """Fill in one step's gradients: forward and backward of each micro-batch, reduction over ranks, clipping.

    Returns:
        The mean loss over the window (0-d, on the device), or ``None`` if every ``training_step`` returned ``None``.
    """
    hooks, window, total = run.hooks, len(micro_batches), None
    on, micro_step = run.module_hooks if run.module_hooks.in_step else None, hooks.micro_step
    for optimizer in run.optimizers:
        if on is not None and on.on_before_zero_grad is not None:
            on.on_before_zero_grad(optimizer)
        zero_grad(optimizer)
    for i, batch in enumerate(micro_batches):
        run.batch = batch
        if on is not None and on.on_train_batch_start is not None:
            batch_starts(run, on.on_train_batch_start, batch, run.batch_idx + i)
        if micro_step is None:
            loss = _forward_backward(run, on, batch, run.batch_idx + i, window)
        else:
            with micro_step(run=run, first=i == 0, last=i == window - 1):
                loss = _forward_backward(run, on, batch, run.batch_idx + i, window)
        if loss is not None:
            total = loss if window == 1 else loss.detach() + (0 if total is None else total)
        if on is not None and on.on_train_batch_end is not None and i < window - 1:  # the last one's comes after the step
            on.on_train_batch_end(without_graph(run.step_output), batch, run.batch_idx + i)
    if total is not None:
        if hooks.reduce_gradients is not None:
            hooks.reduce_gradients(run=run)
        if hooks.clip_gradients is not None:
            hooks.clip_gradients(run=run)
    return total


def _forward_backward(run: Run, on: ModuleHooks | None, batch: Any, batch_idx: int, window: int) -> torch.Tensor | None:
    """Forward and backward of one micro-batch; its loss, divided by the window's length, or ``None`` if the step gave none."""
    output = run.hooks.forward(run=run, method="training_step", args=(batch, batch_idx))
    loss = output if isinstance(output, torch.Tensor) else _loss_in(run, output)
    if loss is not None:
        if window > 1:  # the last window of an epoch may be shorter than accumulate_grad_batches
            loss = loss / window
        if on is not None and on.on_before_backward is not None:
            on.on_before_backward(loss)
        try:
            run.hooks.backward(run=run, loss=loss)
        except RuntimeError:
            explain_backward(run, loss)  # not checked before: the check would cost every step
            raise
    # Kept until the next one is there: freeing the graph early makes the next forward's allocations slower (1 µs of 165).
    run.step_output = output
    if on is not None:
        if on.on_after_backward is not None and loss is not None:
            on.on_after_backward()
        if on.training_epoch_end is not None:
            run.outputs.append(without_graph(output))
    return loss


class EpochIsOver(Exception):
    """``on_train_batch_start`` returned -1; ``train_epoch`` catches it."""


def batch_starts(run: Run, hook: Callable[[Any, int], Any], batch: Any, batch_idx: int) -> None:
    """Call the module's ``on_train_batch_start``, which may return -1 to leave out the rest of the epoch.

    Raises:
        EpochIsOver: it did.
        TrainingError: it did on one of several ranks.
    """
    if hook(batch, batch_idx) == -1:
        if run.world.size > 1:
            raise TrainingError(
                f"on_train_batch_start returned -1 on rank {run.world.rank}: the other ranks would wait for its gradients for ever. "
                "Fix: self.trainer.should_stop = True, or limit_train_batches"
            )
        raise EpochIsOver


def without_graph(output: Any) -> Any:
    """A step's output for those who may keep it: its graph would hold the memory of the whole step."""
    return map_tensors(output, torch.Tensor.detach)


def train_epoch(run: Run) -> None:
    """One pass over the training loader, with the validations that are due inside it."""
    hooks, resumed = run.hooks, run.resumed
    validation_due = _validation_schedule(run)
    step, on_step_end, ended = hooks.step, hooks.on_step_end, False
    run.epoch_start = begin_epoch(run) if resumed is None else resumed.begin_epoch(run)
    device_batches = hooks.device_batches(run=run, loader=run.loaders["train"][0], stage="train")
    batches: Iterator[Any] = islice(device_batches, run.batches["train"][0])
    if run.lengths_unknown["train"]:
        batches = until_first_rank_is_done(run, batches)
    accumulate = run.plan.options.accumulate_grad_batches
    try:
        if resumed is not None and resumed.batch_idx:
            resumed.skip(run, batches)
            taken = (run.batch_idx - 1) % accumulate + 1  # by the step that was the last
            batches = batches if not _ends_after(run, taken, None if resumed.validated else validation_due) else iter(())
        for window in _windows(batches, accumulate):
            step(run=run, micro_batches=window)
            run.step, run.batch_idx, run.batch = run.step + 1, run.batch_idx + len(window), None
            if on_step_end is not None:
                on_step_end(run=run)
            if _ends_after(run, len(window), validation_due):
                break
    except EpochIsOver:
        ended = True
    finally:
        run.step_output = run.batch = None
        close_batches(device_batches, run.loaders["train"][0])
    if run.batch_idx == 0 and not ended:
        if isinstance(run.loaders["train"][0], Iterator) and run.batches_seen:
            raise TrainingError(
                "the training loader is an iterator, which earlier epochs have read to its end. Fix: a DataLoader or a list"
            )
        raise TrainingError("the training loader gave no batch. Fix: look at its dataset, batch_size and drop_last")
    run.batches_seen += run.batch_idx


def _ends_after(run: Run, taken: int, validation_due: Callable[[int], bool] | None) -> bool:
    """Validate and flush where the step makes it due that took so many batches; whether the epoch ends with it."""
    options, validates = run.plan.options, validation_due is not None and validation_due(taken)
    if validates:
        if run.batch_idx == run.batches["train"][0]:
            _step_epoch_schedules(run)
        evaluate(run, "validate")
    if run.schedulers and run.manual is None:
        step_plateaus(run, "validation" if validates else "")
    if run.step % options.log_every_n_steps == 0:
        run.logs.flush()  # the CPU waits for the GPU here
    return run.logs.stop or run.step == options.max_steps


def _step_epoch_schedules(run: Run) -> None:
    """As Lightning does, when an epoch's batches are done: before the validation that follows them."""
    if run.manual is None:
        step_schedules(run, "epoch", run.epoch + 1)


def fit(run: Run) -> None:
    """Epochs until ``max_epochs``, ``max_steps`` or someone's ``should_stop``."""
    hooks, on, options, resumed = run.hooks, run.module_hooks, run.plan.options, run.resumed
    _call(on.on_fit_start)
    if resumed is None and run.loaders.get("validate") and options.num_sanity_val_steps:
        _call(on.on_sanity_check_start)
        evaluate(run, "sanity_check")
        _call(on.on_sanity_check_end)
    _call(on.on_train_start)
    if resumed is not None:
        resumed.start(run)
    before = None if run.manual is not None else (run.step, _versions(run))
    while run.epoch != options.max_epochs and run.step != options.max_steps and not run.logs.stop:
        run.outputs, run.batch_idx = [], 0
        run.logs.open = True
        set_epoch(run.loaders["train"][0], run.epoch)
        fire(hooks.on_epoch_start, run=run)
        _call(on.on_train_epoch_start)
        train_epoch(run)
        if before is not None:
            _warn_if_untrained(run, *before)
            before = None
        _step_epoch_schedules(run)
        if _validates_after(run) and not (run.resumed is not None and run.resumed.validated):
            evaluate(run, "validate")
        run.resumed = None
        if on.training_epoch_end is not None or on.on_train_epoch_end is not None:
            run.logs.refresh_epoch()
        if on.training_epoch_end is not None:
            on.training_epoch_end(run.outputs)
        _call(on.on_train_epoch_end)
        run.logs.end_epoch()
        if run.schedulers and run.manual is None:
            step_plateaus(run, "epoch")
        with torch.no_grad():
            broadcast_buffers(run)
        fire(hooks.on_epoch_end, run=run)
        run.epoch += 1
    _call(on.on_train_end)
    _call(on.on_fit_end)


def _versions(run: Run) -> list[int]:
    """torch's count of in-place changes of each parameter that is stepped."""
    return [parameter._version for parameter in parameters_of(run.optimizers)]


def _warn_if_untrained(run: Run, step: int, versions: list[int]) -> None:
    """Warn if the first epoch had steps, but changed no parameter and left no gradient to change one with."""
    stepped = parameters_of(run.optimizers)
    if run.step == step or not stepped or versions != _versions(run) or any(p.grad is not None for p in stepped) or run.world.rank != 0:
        return
    others = any(parameter.grad is not None for parameter in run.module.parameters())
    if others:
        why = "gradients reached only parameters that no optimizer steps. Fix: give configure_optimizers the parameters of the loss"
    else:
        why = "every training_step returned None, or a plugin dropped its gradients. Fix: return the loss from training_step"
    warnings.warn(f"no step of the first epoch trained anything: {why}", stacklevel=2)


def _windows(batches: Iterator[Any], size: int) -> Iterator[Sequence[Any]]:
    """Batches in windows of ``size``; the last may be shorter. A window is read ahead, because the loss is divided by its
    length: its batches are on the device together."""
    return zip(batches, strict=True) if size == 1 else iter(lambda: list(islice(batches, size)), [])


def _call(hook: Callable[[], Any] | None) -> None:
    if hook is not None:
        hook()


def _loss_in(run: Run, output: Any) -> torch.Tensor | None:
    """The loss in what ``training_step`` returned, where that is no tensor."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor):
        return loss
    if output is not None:
        what = f"a dict with {sorted(map(str, output))}" if isinstance(output, Mapping) else type(output).__name__
        raise TrainingError(f"training_step returned {what}. Fix: return the loss, a dict with it under 'loss', or None to skip the batch")
    if run.world.size > 1:
        raise TrainingError(f"training_step returned None on rank {run.world.rank}: the other ranks would wait for its gradients for ever.")
    return None


def explain_backward(run: Run, loss: torch.Tensor) -> None:
    """Say what is wrong with a loss that has no backward.

    Raises:
        TrainingError: it needs no grad, or is not one number.
    """
    if not loss.requires_grad:
        raise TrainingError(
            f"the loss of {type(run.module).__name__}.training_step needs no grad, so nothing could be learnt from it. "
            "Fix: compute it from parameters with requires_grad=True, without .detach(), .item() or torch.no_grad()"
        )
    if loss.numel() != 1:
        raise TrainingError(f"the loss must be one number, and this one has the shape {list(loss.shape)}. Fix: .mean() or .sum()")


# --- when to validate ----------------------------------------------------------------------------------------------------


def _epoch_is_due(run: Run) -> bool:
    every = run.plan.options.check_val_every_n_epoch
    return bool(run.loaders.get("validate")) and (every is None or (run.epoch + 1) % every == 0)


def _validates_after(run: Run) -> bool:
    """Whether validation belongs after the epoch: ``val_check_interval`` is the whole of it."""
    interval = run.plan.options.val_check_interval
    return isinstance(interval, float) and interval == 1.0 and _epoch_is_due(run)


def _validation_schedule(run: Run) -> Callable[[int], bool] | None:
    """A function that says, given how many batches the step just took, whether validation is due now; ``None``: never in this
    epoch.

    Raises:
        UsageError: an interval that no epoch reaches, or a fraction of a loader without length.
    """
    interval, total = run.plan.options.val_check_interval, run.batches["train"][0]
    if not _epoch_is_due(run) or _validates_after(run):
        return None
    across = run.plan.options.check_val_every_n_epoch is None
    if isinstance(interval, float):
        if total is None:
            raise UsageError(f"val_check_interval={interval} of a training loader without length. Fix: a whole number of batches")
        every = max(1, int(total * interval))
    else:
        every = interval
        if not across and total is not None and every > total:
            raise UsageError(
                f"val_check_interval={every} is more than the {total} batches of an epoch, so validation would never run. "
                "Fix: a smaller one, or check_val_every_n_epoch=None to count across epochs"
            )
    base = run.batches_seen if across else 0

    def due(taken: int) -> bool:
        done = base + run.batch_idx
        return done // every > (done - taken) // every

    return due
