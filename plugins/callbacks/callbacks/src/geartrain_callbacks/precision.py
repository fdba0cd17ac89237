"""``precision``: the floating-point formats of the weights and of the step methods.

``*-true`` uses one format for weights and batches. ``*-mixed`` keeps weights in float32, and
torch's autocast selects the format of each operation. Entry points of the group
``geartrain.precisions`` name the classes; a plugin with another precision has one too.

Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Module, Run, UsageError, hookimpl
from geartrain.plugin_api import MappedBatches, map_tensors, parameters_of

#: The metric that counts the optimizer steps of each epoch that the gradient scaler skipped.
SKIPPED = "skipped_steps"


class TruePrecision:
    """One dtype for weights, buffers, batches and new tensors of the step methods.

    Args:
        dtype: a floating-point dtype. The module keeps it after the run.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @hookimpl(wrapper=True)
    def wrap_model(self, model: nn.Module) -> Generator[None, nn.Module, nn.Module]:
        # Not Module.to(dtype), which makes complex tensors real. In place: optimizers hold these
        # parameters.
        model._apply(self._cast)  # type: ignore[no-untyped-call]
        return (yield)

    @hookimpl(wrapper=True)
    def device_batches(
        self, loader: Iterable[Any]
    ) -> Generator[None, Iterator[Any], Iterator[Any]]:
        return MappedBatches((yield), loader, lambda batch: map_tensors(batch, self._cast))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Surround a step method."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)  # torch.zeros(3) in a step has this dtype too
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @hookimpl(wrapper=True)
    def forward(self) -> Generator[None, Any, Any]:
        with self.computing():
            return (yield)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


class DoublePrecision(TruePrecision):
    """``64-true``."""

    def __init__(self) -> None:
        super().__init__(torch.float64)


class BF16Precision(TruePrecision):
    """``bf16-true``."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)


class MixedPrecision:
    """Step methods run under autocast; weights, gradients and optimizer states stay in float32.

    Args:
        label: the precision's name in errors: ``distribution[name]``.
        dtype: the dtype of operations for which autocast considers it safe.
    """

    def __init__(self, label: str, dtype: torch.dtype) -> None:
        self._label, self._dtype = label, dtype

    @hookimpl(wrapper=True)
    def setup_device(self) -> Generator[None, torch.device, torch.device]:
        device = yield
        if not torch.amp.is_autocast_available(device.type):
            message = f"{self._label}: torch has no autocast for {device.type}"
            raise UsageError(f"{message}. Fix: --precision 32")
        reason = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:  # made once, because that takes longer than to enter it
                self._autocast = torch.autocast(device.type, self._dtype)
            except RuntimeError as error:
                reason = str(error)
        # If the device cannot do it, torch warns and returns an autocast that does nothing.
        if reason or not self._autocast._enabled:
            reason = reason or " ".join(
                " ".join(str(warning.message).split()) for warning in caught
            )
            message = f"{self._label}: {device} does not support {self._dtype}"
            raise UsageError(f"{message}: {reason} Fix: --precision 32")
        return device

    def computing(self) -> AbstractContextManager[Any]:
        """Surround a step method."""
        return copy.copy(self._autocast)  # one autocast cannot be entered twice at a time

    @hookimpl(wrapper=True)
    def forward(self) -> Generator[None, Any, Any]:
        with self._autocast:
            return (yield)


class BF16MixedPrecision(MixedPrecision):
    """``bf16-mixed``."""

    def __init__(self) -> None:
        super().__init__("geartrain-callbacks[bf16-mixed]", torch.bfloat16)


class ScaledPrecision(MixedPrecision):
    """``16-mixed``: float16, with a gradient scaler so that small gradients do not become zero.

    The loss is scaled up for backward, and the gradients down before clipping. If gradients
    overflow, the step is skipped and counted, and the scale is halved.

    torch reads the overflow on the CPU, so the CPU waits for the device once a step. bf16-mixed has
    no scaler.
    """

    #: With another owner of one of them, only losses or only gradients would be scaled.
    must_own = frozenset({"backward", "optimizer_step"})
    #: Gradients overflow on all ranks or on none, so the scale is the same.
    same_on_all_ranks = True

    _scaler: torch.amp.GradScaler

    def __init__(self) -> None:
        super().__init__("geartrain-callbacks[16-mixed]", torch.float16)

    @hookimpl
    def check_plan(self, module: Module | type[Module]) -> None:
        named = module.named_parameters() if isinstance(module, Module) else ()
        half = [name for name, parameter in named if parameter.dtype == torch.float16]
        if half:
            raise UsageError(
                f"{self._label}: {type(module).__name__}.{half[0]} is float16, but weights stay in "
                "float32 here. "
                "Fix: take out .half(); autocast computes in float16 where that is safe"
            )

    @hookimpl(wrapper=True)
    def wrap_model(self, run: Run) -> Generator[None, nn.Module, nn.Module]:
        self._scaler, self._seen = torch.amp.GradScaler(run.device.type), set[int]()
        self._unscaled = self._skipped = self._due = False
        return (yield)

    @hookimpl(wrapper=True)
    def wrap_optimizer(self, run: Run) -> Generator[None, Optimizer, Optimizer]:
        optimizer = yield
        if run.loop.needs_closure:
            message = f"{self._label} cannot skip steps of an optimizer that needs a closure"
            raise UsageError(f"{message}. Fix: --precision bf16-mixed or 32")
        own_parameters = {id(parameter) for parameter in parameters_of([optimizer])}
        if own_parameters & self._seen:
            message = f"{self._label}: two optimizers share a parameter"
            reason = "whose gradient would be scaled down twice"
            raise UsageError(f"{message}, {reason}. Fix: choose one of them")
        self._seen |= own_parameters
        return optimizer

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        run.log(SKIPPED, 0, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)

    @hookimpl
    def backward(self, run: Run, loss: torch.Tensor) -> None:
        if self._due:
            self._scaler.update()
            self._due = False
        if run.mode == "session":  # which calls no method of the module
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            return
        if self._unscaled:
            self._finish(run)  # the module's optimizer_step skipped the last optimizer
        run.module.backward(self._scaler.scale(loss))

    @hookimpl(wrapper=True)
    def reduce_gradients(self, run: Run) -> Generator[None, None, None]:
        yield  # reduces scaled gradients: an overflow on one rank becomes one on all ranks
        for optimizer in filter(_has_gradients, run.optimizers):
            self._scaler.unscale_(optimizer)
            self._unscaled = True

    @hookimpl
    def optimizer_step(self, run: Run, optimizer: Optimizer) -> bool:
        self._stepped = False
        note = optimizer.register_step_pre_hook(self._note)
        try:
            # The scaler refuses an optimizer without gradients. The CPU waits for the device here.
            self._scaler.step(optimizer) if _has_gradients(optimizer) else optimizer.step()
        finally:
            note.remove()
        self._skipped |= not self._stepped
        if optimizer is run.optimizers[-1]:
            self._finish(run)
        return self._stepped

    def state_dict(self) -> dict[str, Any]:
        """Return the scale; nothing before the run is set up."""
        state: dict[str, Any] = self._scaler.state_dict() if hasattr(self, "_scaler") else {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with this scale."""
        if not state:
            return
        if not hasattr(self, "_scaler"):  # a copy, of which another one has trained
            self._scaler = torch.amp.GradScaler("cpu")
        self._scaler.load_state_dict(state)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        """Note a call of ``optimizer.step``.

        A fused optimizer is called for a skipped step too, with the overflow in ``found_inf``.
        """
        overflow = getattr(optimizer, "found_inf", None)
        self._stepped = overflow is None or not bool(overflow)

    def _finish(self, run: Run) -> None:
        """Count skipped steps and adjust the scale, after a step's last optimizer."""
        if self._skipped:
            run.log(SKIPPED, 1, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
        if self._unscaled and run.mode == "session":
            self._due = True  # at the next backward: other optimizers may step on these gradients
        elif self._unscaled:
            self._scaler.update()
        self._unscaled = self._skipped = False


def _has_gradients(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(parameter.grad is not None for group in groups for parameter in group["params"])
