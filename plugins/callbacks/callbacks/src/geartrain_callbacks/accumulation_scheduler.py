"""``accumulation_scheduler``: another ``accumulate_grad_batches`` from an epoch on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from geartrain import Plan, Run, UsageError, hookimpl
from geartrain_callbacks.callback import PluginCallback


class GradientAccumulationScheduler(PluginCallback):
    """Change ``accumulate_grad_batches`` at the start of epochs.

    ``GradientAccumulationScheduler({0: 8, 4: 1})`` accumulates 8 batches in each of the epochs 0 to
    3, and from epoch 4 on it steps after every batch. ``trainer.estimated_stepping_batches``
    counts with the numbers of each epoch.

    Args:
        scheduling: epoch, from 0 -> batches of a step. Before the first of them it is 1.

    Raises:
        UsageError: an epoch or a number that is not a whole number, or ``accumulate_grad_batches``
            is also given, or the module optimizes manually.

    Source: ``GradientAccumulationScheduler`` of PyTorch Lightning.
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not isinstance(scheduling, Mapping) or not scheduling:
            message = f"accumulation_scheduler: scheduling={scheduling!r} names no epoch"
            raise UsageError(f"{message}. Fix: use a dict such as {{0: 8, 4: 1}}")
        for message, number, least in (
            *(("epoch", epoch, 0) for epoch in scheduling),
            *(("number of batches", size, 1) for size in scheduling.values()),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise UsageError(
                    f"accumulation_scheduler: {number!r} must be a whole {message}, "
                    f"at least {least}."
                )
        self.scheduling = dict(sorted(scheduling.items()))

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the batches of one optimizer step in an epoch."""
        return next((k for first, k in reversed(self.scheduling.items()) if first <= epoch), 1)

    @hookimpl
    def check_plan(self, plan: Plan, module: Any) -> None:
        given = plan.options.accumulate_grad_batches
        if given != 1:
            message = "geartrain-callbacks[accumulation_scheduler] sets accumulate_grad_batches"
            raise UsageError(f"{message}, and it is {given} too. Fix: give one of them")
        if getattr(module, "automatic_optimization", True) is False:
            raise UsageError(
                "geartrain-callbacks[accumulation_scheduler] would do nothing: the module "
                "optimizes manually. Fix: accumulate in training_step"
            )

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        _set(run, self.get_accumulate_grad_batches(run.epoch))

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        _set(run, 1)

    @hookimpl(specname="on_exception")
    def _on_exception(self, run: Run) -> None:
        _set(run, 1)


def _set(run: Run, size: int) -> None:
    if run.plan.options.accumulate_grad_batches != size:
        options = replace(run.plan.options, accumulate_grad_batches=size)
        run.plan = run.trainer.plan = replace(run.plan, options=options)
