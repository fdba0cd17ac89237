"""``automatic_optimization = False``: owns what is then otherwise; :mod:`geartrain.loop.manual.optimisation` is what the module calls."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from geartrain.hookspecs import hookimpl
from geartrain.loop.fit import batch_starts, without_graph
from geartrain.loop.manual.optimisation import Manual
from geartrain.loop.optimizers import clip, parameters_of
from geartrain.loop.run import Run


class ManualOptimisation:
    """Owns what differs from automatic optimisation; a part of the run where the module says ``automatic_optimization = False``."""

    #: A forward of the strategy's would go through its wrapper, and a step of another's would do backward itself.
    must_own = frozenset({"step", "forward", "clip_gradients"})

    def __init__(self) -> None:
        self._looked = False

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        run.step_functions, run.manual, self._looked = run.unwrapped.calls(run.unwrapped), Manual(run), False

    @hookimpl
    def step(self, run: Run, micro_batches: Sequence[Any]) -> None:
        hooks, on = run.hooks, run.module_hooks if run.module_hooks.in_step else None
        (run.batch,) = micro_batches  # one: accumulate_grad_batches was refused
        if on is not None and on.on_train_batch_start is not None:
            batch_starts(run, on.on_train_batch_start, run.batch, run.batch_idx)
        around: AbstractContextManager[Any] = (
            nullcontext() if hooks.micro_step is None else hooks.micro_step(run=run, first=True, last=True)
        )
        with around:
            run.step_output = hooks.forward(run=run, method="training_step", args=(run.batch, run.batch_idx))
        if on is not None and on.training_epoch_end is not None:
            run.outputs.append(without_graph(run.step_output))
        if on is not None and on.on_train_batch_end is not None:
            on.on_train_batch_end(without_graph(run.step_output), run.batch, run.batch_idx)

    @hookimpl
    def forward(self, run: Run, method: str, args: tuple[Any, ...]) -> Any:
        return run.step_functions[method](*args)

    @hookimpl
    def backward(self, run: Run, loss: torch.Tensor) -> None:
        assert run.manual is not None
        loss.backward(**run.manual.options)  # type: ignore[no-untyped-call]

    @hookimpl
    def clip_gradients(self, run: Run) -> torch.Tensor | None:
        assert run.manual is not None
        if run.manual.limit is None:
            return None
        limit, algorithm = run.manual.limit
        return clip(parameters_of(run.optimizers), limit, algorithm)

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        assert run.manual is not None
        if not self._looked and not run.manual.steps and run.world.rank == 0:
            warnings.warn(
                f"{type(run.module).__name__}.automatic_optimization is False, and no optimizer was stepped in the first epoch. "
                "Fix: self.optimizers().step() in training_step, or automatic_optimization = True",
                stacklevel=2,
            )
        self._looked = True

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        _release(run)

    @hookimpl
    def on_exception(self, run: Run) -> None:
        _release(run)


def _release(run: Run) -> None:
    if run.manual is not None:
        run.manual.release()
