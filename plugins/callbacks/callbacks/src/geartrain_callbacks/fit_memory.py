"""``fit_memory``: repeat a step that runs out of memory with smaller micro-batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from geartrain import Module, Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import libraries, map_tensors, warn
from geartrain_callbacks.parts.combine import combine
from geartrain_callbacks.parts.logs import StepLogs
from geartrain_callbacks.parts.split import split

_NAME = "geartrain-callbacks[fit_memory]"
#: The metric with the number of micro-batches.
METRIC = "micro_batches"
#: Hooks before ``reduce_gradients`` in which a strategy may let ranks wait for each other.
_BEFORE = ("step", "micro_step", "forward", "backward")


class FitMemory:
    """Repeat a step that runs out of memory with twice as many micro-batches of half the size.

    This happens as often as needed, down to one sample. Each batch is then split so for the rest of
    the fit, and in a fit that resumes. The step's gradients are those of the whole batch: the mean
    of the micro-batches' losses, weighted by their samples. What a module logs in a step is logged
    once for each batch.

    On several ranks a rank alone may run out of memory: it repeats its own part of the step, for
    which the others wait in the reduction of gradients. It comes after the backward here, not
    during it. From the next epoch on all ranks split alike.

    Args:
        loss: ``"mean"`` if ``training_step`` returns a mean over samples, ``"sum"`` for a sum.

    Raises:
        UsageError: ``loss`` is something else; the module optimizes manually, or by a closure; or
            ranks wait for each other during forward or backward, as under fsdp.
        TrainingError: in the step that runs out of memory: a batch cannot be split.
    """

    def __init__(self, loss: Literal["mean", "sum"] = "mean") -> None:
        if loss not in ("mean", "sum"):
            raise UsageError(f"{_NAME}: loss={loss!r} is unknown. Fix: 'mean' or 'sum'")
        self.loss = loss
        #: Of each batch.
        self.micro_batches = 1

    def state_dict(self) -> dict[str, Any]:
        return {"micro_batches": self.micro_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.micro_batches = state["micro_batches"]

    # --- refusals ---------------------------------------------------------------------------------

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        if not module.automatic_optimization:
            message = f"{_NAME} cannot repeat a step of manual optimisation, which is the module's"
            raise UsageError(f"{message}. Fix: leave it out, or use automatic optimisation")

    @hookimpl(wrapper=True)
    def launch(self, run: Run) -> Generator[None, Any, Any]:
        if sum(isinstance(part.plugin, FitMemory) for part in run.hooks.parts) > 1:
            raise UsageError(f"{_NAME} is given twice, and would split parts again. Fix: once")
        several = run.command == "fit" and run.plan.processes != 1
        if several and not (_averages_late(run) or _reduces_alone(run)):
            message = f"{run.plan.strategy.label}: ranks wait for each other during forward or "
            message += f"backward, where {_NAME} would leave them waiting"
            raise UsageError(f"{message}. Fix: --strategy ddp, or leave it out")
        if "reduce_bucket" in run.hooks.names and (by := run.hooks.implementers("reduce_bucket")):
            message = f"{by[0].label} reduces DDP's buckets, of which {_NAME} has none"
            raise UsageError(f"{message}. Fix: use one without the other")
        return (yield)

    # --- the step ---------------------------------------------------------------------------------

    @hookimpl
    def on_fit_start(self, run: Run) -> None:
        if run.loop.needs_closure:
            name = type(run.optimizers[0]).__name__
            message = f"{_NAME} cannot repeat a step of {name}, which computes several losses"
            raise UsageError(f"{message}. Fix: leave it out, or use another optimizer")
        names = [n for n, m in run.module.named_modules() if isinstance(m, nn.SyncBatchNorm)]
        if names and run.world.size > 1:
            message = f"{_NAME}: ranks wait for each other in {names[0]}, a SyncBatchNorm"
            raise UsageError(f"{message}. Fix: leave out one of them")
        self._average: Callable[..., Any] | None = None
        if run.world.size > 1 and _averages_late(run):
            self._average = _strategy(run).average_gradients
        answers: dict[str, Callable[..., Any]] = {
            "step": self._step,
            "micro_step": self._micro_step,
            "forward": self._forward,
            "reduce_gradients": self._reduce_gradients,
        }
        # In a dict: as attributes they would be taken for hookimpls of this plugin.
        self._call = {name: run.hooks.replace_caller(name, a) for name, a in answers.items()}

    def _step(self, run: Run, micro_batches: Sequence[Any]) -> None:
        while not self._has_stepped(run, micro_batches):
            # The error's frames, which held the tensors, are gone.
            run.loop.step_output = None
            gc.collect()
            if run.device.type != "cpu":
                torch.get_device_module(run.device).empty_cache()

    def _has_stepped(self, run: Run, micro_batches: Sequence[Any]) -> bool:
        """Do one step; False if it ran out of memory and can be repeated in smaller parts."""
        self._window, self._logs, restore = len(micro_batches), StepLogs(run), _restoring(run)
        try:
            with self._logs:
                self._call["step"](run=run, micro_batches=micro_batches)
        except torch.OutOfMemoryError as error:
            if self._logs.are_passed_on:  # optimizers may have stepped
                raise
            self._split_more(run, micro_batches, error)
        else:
            return True
        restore()
        return False

    def _split_more(self, run: Run, micro_batches: Sequence[Any], error: Exception) -> None:
        largest = 0
        for batch in micro_batches:
            try:
                parts, sizes = split(batch, self.micro_batches)
            except TrainingError as reason:
                raise TrainingError(f"{_NAME}: out of memory, and {reason}") from error
            if parts[0] is batch:
                message = f"out of memory, and a {type(batch).__name__} has no tensor with a row "
                message += "for each sample, so that it cannot be split"
                hint = "batches of tensors in lists, dicts or dataclasses, or a smaller batch_size"
                raise TrainingError(f"{_NAME}: {message}. Fix: {hint}") from error
            largest = max(largest, *sizes)
        if largest == 1:
            error.add_note(f"{_NAME}: a micro-batch of one sample does not fit")
            raise error
        self.micro_batches *= 2
        place = f"{_NAME}: step {run.step} ran out of memory on rank {run.world.rank}"
        warn(f"{place}. It is repeated, and each batch has {self.micro_batches} micro-batches now")

    def _micro_step(self, run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
        last = last and self._average is None  # otherwise gradients stay on this rank
        enter = self._call["micro_step"]
        context: AbstractContextManager[Any] = enter(run=run, first=first, last=last)
        return context

    def _reduce_gradients(self, run: Run) -> None:
        self._logs.pass_on()  # all gradients of this rank exist: nothing is repeated any more
        if self._average is not None:
            parameters = list(run.module.parameters())
            self._average(run, parameters, [p.grad is not None for p in parameters])
        self._call["reduce_gradients"](run=run)

    def _forward(self, run: Run, method: str, args: tuple[Any, ...]) -> Any:
        forward = self._call["forward"]
        if method != "training_step":
            return forward(run=run, method=method, args=args)
        batch, *others = args
        parts, sizes = [batch], [1]
        if self.micro_batches > 1:
            parts, sizes = split(batch, self.micro_batches)
        shares: list[torch.Tensor] = []
        outputs: list[Any] = []
        for index, part in enumerate(parts):
            with self._logs.of_part(batch, part, index, sizes[index]):
                output = forward(run=run, method=method, args=(part, *others))
            loss: Any = output.get("loss") if isinstance(output, Mapping) else output
            if len(parts) == 1 or (output is not None and not isinstance(loss, torch.Tensor)):
                return output  # core refuses what is no loss
            _refuse_unclear(output)
            share = loss if self.loss == "sum" else loss * (sizes[index] / sum(sizes))
            if index + 1 < len(parts):
                run.backward(share / self._window)
                share = share.detach()
            shares.append(share)
            outputs.append(map_tensors(output, torch.Tensor.detach))
            del output, loss, share  # the next part must not find the memory of this one taken
        # Its backward is that of the last part; its value is that of all.
        whole = sum(shares[:-1], shares[-1])
        combined = combine(method, outputs, sizes)
        return {**combined, "loss": whole} if isinstance(combined, Mapping) else whole

    # --- the ranks agree --------------------------------------------------------------------------

    @hookimpl
    def on_train_epoch_end(self, run: Run) -> None:
        run.log(METRIC, self.micro_batches, on_epoch=True, reduce_fx="max", sync_dist=True)

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        self.micro_batches = int(run.metrics[METRIC])


def _refuse_unclear(output: Any) -> None:
    """Refuse the output of a part of a batch that does not tell the gradients of the batch."""
    if output is None:
        message, hint = "returned None for a part of", "give samples to skip a loss of 0"
    elif isinstance(output, Mapping) and "weight" in output:
        message, hint = "returned a weight for a part of", "return the mean loss without 'weight'"
    else:
        return
    message = f"training_step {message} a batch, which {_NAME} has split"
    raise TrainingError(f"{message}. Fix: {hint}")


def _restoring(run: Run) -> Callable[[], None]:
    """Return a function that restores torch's generators, and the states of metric objects."""
    before = torch.get_rng_state()
    device = torch.get_device_module(run.device) if run.device.type != "cpu" else None
    of_device = None if device is None else device.get_rng_state()
    clone = torch.Tensor.clone
    metrics = [(m, map_tensors(m.states(run.module), clone)) for m in libraries().values()]

    def restore() -> None:
        torch.set_rng_state(before)
        if device is not None:
            device.set_rng_state(of_device)
        for library, states in metrics:
            for path in library.states(run.module).keys() - states.keys():
                run.module.get_submodule(path).reset()  # type: ignore[operator]
            library.set_states(run.module, states)

    return restore


def _strategy(run: Run) -> Any:
    return next(part.plugin for part in run.hooks.parts if part.info.kind == "strategy")


def _home(cls: type, name: str) -> type | None:
    return next((base for base in cls.__mro__ if name in vars(base)), None)


def _averages_late(run: Run) -> bool:
    """True if the strategy can average gradients after the backward, with ``average_gradients``.

    Its class names the methods on which this depends. A subclass that overrides one cannot.
    """
    cls = type(_strategy(run))
    home = _home(cls, "averages_late")
    names = (*_BEFORE, *getattr(cls, "averages_late", ()))
    return home is not None and all(_home(cls, name) in (home, None) for name in names)


def _reduces_alone(run: Run) -> bool:
    """True if the strategy does nothing before ``reduce_gradients``, which is its own."""
    cls = type(_strategy(run))
    return _home(cls, "reduce_gradients") is not None and not any(_home(cls, h) for h in _BEFORE)
