"""The methods of a module, or of a callback, as implementations of the events."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from geartrain import hookspecs
from geartrain.hookspecs import hookimpl
from geartrain.module.module import overridden
from geartrain.module.nested import map_tensors

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: Event -> the method of a module that implements it, with the event's arguments except ``run``.
_TRAINING = {
    **{name: name for name in ("on_fit_start", "on_fit_end", "on_train_start", "on_train_end")},
    **{name: name for name in ("on_sanity_check_start", "on_sanity_check_end")},
    **{name: name for name in ("on_train_batch_start", "on_train_batch_end", "on_after_backward")},
    **{name: name for name in ("on_before_zero_grad", "on_before_backward")},
    **{name: name for name in ("on_before_optimizer_step", "on_train_epoch_end")},
    "on_epoch_start": "on_train_epoch_start",
}
#: Event of each evaluation -> the methods by stage.
_EVALUATION = {
    f"on_validation_{event}": {
        "validate": f"on_validation_{event}",
        "sanity_check": f"on_validation_{event}",
        "test": f"on_test_{event}",
        "predict": f"on_predict_{event}",
    }
    for event in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
}
#: The methods of a module that events call.
METHODS = frozenset({*_TRAINING.values(), *(m for e in _EVALUATION.values() for m in e.values())})

#: Arguments of an event besides ``run`` -> makes a function of a method; pluggy reads the names.
_FUNCTIONS: dict[tuple[str, ...], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    (): lambda method: lambda: method(),
    ("loss",): lambda method: lambda loss: method(loss),
    ("optimizer",): lambda method: lambda optimizer: method(optimizer),
    ("batch", "batch_idx"): lambda method: lambda batch, batch_idx: method(batch, batch_idx),
    # A graph would hold the memory of the step.
    ("outputs", "batch", "batch_idx"): lambda method: (
        lambda outputs, batch, batch_idx: method(
            map_tensors(outputs, torch.Tensor.detach), batch, batch_idx
        )
    ),
}


class Events:
    """A plugin of methods; each implements its event after the plugins registered before.

    Args:
        methods: by name, functions with the arguments of the module's methods.
    """

    def __init__(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        for event, name in _TRAINING.items():
            if name in methods:
                arguments = tuple(inspect.signature(getattr(hookspecs, event)).parameters)[1:]
                self._add(event, _FUNCTIONS[arguments](methods[name]))
        for event, names in _EVALUATION.items():
            by_stage = {stage: methods[name] for stage, name in names.items() if name in methods}
            if by_stage:
                self._add(event, _of_stage(event, by_stage))

    def _add(self, event: str, function: Callable[..., Any]) -> None:
        setattr(self, event, hookimpl(trylast=True)(function))


def _of_stage(event: str, methods: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function for an event that calls the method of the running stage."""

    def call(run: Run) -> None:
        if run.stage in methods:
            methods[run.stage]()

    def batch_start(run: Run, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        if run.stage in methods:
            methods[run.stage](batch, batch_idx, *index(run, dataloader_idx))

    def batch_end(run: Run, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        if run.stage in methods:
            methods[run.stage](outputs, batch, batch_idx, *index(run, dataloader_idx))

    def index(run: Run, dataloader_idx: int) -> tuple[int, ...]:
        """Return the argument that methods get if there are several loaders."""
        return (dataloader_idx,) if len(run.current_stage.loaders) > 1 else ()

    if event == "on_validation_batch_start":
        return batch_start
    return batch_end if event == "on_validation_batch_end" else call


def methods_of(run: Run) -> dict[str, Callable[..., Any]]:
    """Return the methods of the run's module that implement events, by name."""
    return {n: getattr(run.module, n) for n in METHODS if overridden(run.module, n)}
