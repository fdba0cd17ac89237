"""``precision``: in which floating-point format the step methods compute, and in which the weights are kept.

``*-true`` keeps weights and batches in that format. ``*-mixed`` keeps weights in float32 and lets torch's autocast choose the format of
each operation: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740. Entry points of the group ``geartrain.precisions`` name the
classes; a plugin that brings another precision does the same.
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

from geartrain.data.loaders import Through
from geartrain.errors import UsageError
from geartrain.hookspecs import hookimpl
from geartrain.loop.run import Run
from geartrain.module.module import Module
from geartrain.module.nested import map_tensors

#: The metric that counts, epoch by epoch, the optimizer steps that the gradient scaler skipped.
SKIPPED = "skipped_steps"


class FullPrecision:
    """``32-true``: torch's default."""


class TruePrecision:
    """Weights, buffers, batches and new tensors of the step methods are all of one dtype.

    Args:
        dtype: a floating-point dtype. The module keeps it after the run.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @hookimpl(wrapper=True)
    def wrap_model(self, model: nn.Module) -> Generator[None, nn.Module, nn.Module]:
        # Not Module.to(dtype), which makes complex tensors real. In place, so optimizers find the same parameters.
        model._apply(self._cast)  # type: ignore[no-untyped-call]
        return (yield)

    @hookimpl(wrapper=True)
    def device_batches(
        self, loader: Iterable[Any]
    ) -> Generator[None, Iterator[Any], Iterator[Any]]:
        return Through((yield), loader, lambda batch: map_tensors(batch, self._cast))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Surround a step method."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(
            self._dtype
        )  # so that torch.zeros(3) in a step is of this dtype too
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
        name: as the user chose it, for errors.
        dtype: what autocast computes in if that is safe.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._label, self._dtype = f"geartrain[{name}]", dtype

    @hookimpl(wrapper=True)
    def setup_device(self) -> Generator[None, torch.device, torch.device]:
        device = yield
        if not torch.amp.is_autocast_available(device.type):
            raise UsageError(
                f"{self._label}: torch has no autocast for {device.type}. Fix: --precision 32"
            )
        why = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._autocast = torch.autocast(
                    device.type, self._dtype
                )  # made once: it takes longer to make than to enter
            except RuntimeError as error:
                why = str(error)
        # If the device cannot do it, torch warns and returns an autocast that does nothing: float32 under another name.
        if why or not self._autocast._enabled:
            why = why or " ".join(" ".join(str(warning.message).split()) for warning in caught)
            raise UsageError(
                f"{self._label}: {device} does not support {self._dtype}: {why} Fix: --precision 32"
            )
        return device

    def computing(self) -> AbstractContextManager[Any]:
        """Surround a step method."""
        return copy.copy(self._autocast)  # one that is entered twice at once would not be left

    @hookimpl(wrapper=True)
    def forward(self) -> Generator[None, Any, Any]:
        with self._autocast:
            return (yield)


class BF16MixedPrecision(MixedPrecision):
    """``bf16-mixed``."""

    def __init__(self) -> None:
        super().__init__("bf16-mixed", torch.bfloat16)


class ScaledPrecision(MixedPrecision):
    """``16-mixed``: mixed precision in float16, whose small gradients would become zero.

    The loss is scaled up for backward, and the gradients down before clipping. A step whose gradients overflowed is skipped, counted, and
    the scale halved.

    torch reads on the CPU whether gradients overflowed, so the CPU waits for the device once a step; bf16-mixed has no scaler.
    """

    #: With another owner of one of them, losses would be scaled and gradients not, or the reverse.
    must_own = frozenset({"backward", "optimizer_step"})
    #: Gradients overflow on all ranks or on none, so the scale is the same.
    same_on_all_ranks = True

    _scaler: torch.amp.GradScaler

    def __init__(self) -> None:
        super().__init__("16-mixed", torch.float16)

    @hookimpl
    def check_plan(self, module: Module | type[Module]) -> None:
        half = (
            [name for name, p in module.named_parameters() if p.dtype == torch.float16]
            if isinstance(module, Module)
            else []
        )
        if half:
            raise UsageError(
                f"{self._label}: {type(module).__name__}.{half[0]} is float16, but weights stay in float32 here. "
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
        if run.needs_closure:
            raise UsageError(
                f"{self._label} cannot skip steps of an optimizer that needs a closure. Fix: --precision bf16-mixed or 32"
            )
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if mine & self._seen:
            raise UsageError(
                f"{self._label}: two optimizers share a parameter, whose gradient would be scaled down twice. Fix: one of them"
            )
        self._seen |= mine
        return optimizer

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        run.log(SKIPPED, 0, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)

    @hookimpl
    def backward(self, loss: torch.Tensor) -> None:
        if self._due:
            self._scaler.update()
            self._due = False
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    @hookimpl(wrapper=True)
    def reduce_gradients(self, run: Run) -> Generator[None, None, None]:
        yield  # scaled gradients are reduced: an overflow on one rank becomes one on all, which then skip together
        for optimizer in filter(_has_gradients, run.optimizers):
            self._scaler.unscale_(optimizer)
            self._unscaled = True

    @hookimpl
    def optimizer_step(self, run: Run, optimizer: Optimizer) -> bool:
        self._stepped = False
        note = optimizer.register_step_pre_hook(self._note)
        try:
            # The scaler refuses an optimizer that has nothing to unscale. Otherwise the CPU waits for the device here.
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
        if state:
            self._scaler.load_state_dict(state)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        """Note a call of ``optimizer.step``. A fused optimizer is called for a skipped step too, with the overflow in ``found_inf``."""
        overflow = getattr(optimizer, "found_inf", None)
        self._stepped = overflow is None or not bool(overflow)

    def _finish(self, run: Run) -> None:
        """After a step's last optimizer: count skipped steps, adjust the scale."""
        if self._skipped:
            run.log(SKIPPED, 1, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
        if self._unscaled and run.mode == "session":
            self._due = (
                True  # with the next backward: other optimizers may step on gradients of this one's
            )
        elif self._unscaled:
            self._scaler.update()
        self._unscaled = self._skipped = False


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(
        parameter.grad is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
