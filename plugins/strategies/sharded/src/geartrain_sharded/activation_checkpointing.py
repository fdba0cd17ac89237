"""``activation_checkpointing``: compute activations twice instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from geartrain import Module, Run, UsageError, hookimpl
from geartrain_sharded.units import check_classes

_LABEL = "geartrain-sharded[activation_checkpointing]"


class ActivationCheckpointing:
    """In a ``fit``, keep only the inputs of parts of the module, under any strategy.

    The backward computes such a part's forward again, with the same random numbers. Gradients are
    equal; a step takes longer, and the activations inside the parts take no memory until then.

    Args:
        units: class names of the parts, such as ``["Block"]``.
        every: only each n-th of them, in the order of ``modules()``.

    Raises:
        UsageError: the module has no such part; one has BatchNorm, whose statistics would count
            each batch twice; or ``every`` is below 1.

    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; torch.utils.checkpoint
    """

    def __init__(self, units: Sequence[str] | str, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"{_LABEL}: every={every!r} must be at least 1.")
        self.units = [units] if isinstance(units, str) else list(units)
        self.every = every
        #: Units, with the ``forward`` that the object had beside its class.
        self._changed: list[tuple[nn.Module, Any]] = []

    @hookimpl
    def check_plan(self, module: Module | type[Module]) -> None:
        if not isinstance(module, Module):
            return
        check_classes(module, self.units, _LABEL)
        for unit in self._chosen(module):
            norms = [m for m in unit.modules() if isinstance(m, _BatchNorm)]
            if any(norm.track_running_stats for norm in norms):
                message = f"{_LABEL}: {type(unit).__name__} has BatchNorm, whose statistics would"
                raise UsageError(f"{message} count each batch twice. Fix: units without it")

    @hookimpl(wrapper=True)
    def wrap_model(self, run: Run, model: nn.Module) -> Generator[None, Any, Any]:
        if run.command == "fit":
            units = self._chosen(run.module)
            self._changed = [(unit, vars(unit).get("forward")) for unit in units]
            for unit in units:
                unit.forward = _twice(unit.forward)
        return (yield)

    @hookimpl(wrapper=True)
    def teardown_process_group(self) -> Generator[None, Any, None]:
        try:
            yield
        finally:  # after the plugins that wrapped later
            for unit, before in self._changed:
                del unit.forward
                if before is not None:
                    unit.forward = before
            self._changed = []

    def _chosen(self, module: nn.Module) -> list[nn.Module]:
        return [m for m in module.modules() if type(m).__name__ in self.units][:: self.every]


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False)
