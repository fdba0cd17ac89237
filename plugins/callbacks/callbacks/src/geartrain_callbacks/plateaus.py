"""Schedulers that read a metric, as ReduceLROnPlateau: when they step, and by which value."""

from __future__ import annotations

from geartrain import Run, UsageError
from geartrain.plugin_api import nearest, warn


def step_plateaus(run: Run, ends: str) -> None:
    """Step the schedulers that read a metric and are due, if rank 0 has a new value of it.

    Args:
        ends: ``"validation"`` or ``"epoch"`` if one has just ended. Otherwise only schedulers that
            became due in this step are tried.

    Raises:
        UsageError: the metric of a strict scheduler was never logged.
    """
    for schedule in run.schedulers if run.mode == "automatic" else ():
        waits = schedule.interval == "epoch" and ends != "epoch"
        if not schedule.due or waits or (not ends and schedule.due != run.step):
            continue
        name = str(schedule.monitor)
        value, when, known = run.logs.newest(name)
        if value is not None and when != schedule.judged:
            run.module.lr_scheduler_step(schedule.scheduler, value)
            schedule.judged = when
            schedule.due = 0
        elif value is None and ends == "epoch" and not _is_validated_later(run):
            message = f"ReduceLROnPlateau monitors {schedule.monitor!r}, which was not logged"
            text = f"{message}. {nearest(name, known)}"
            if schedule.strict:
                raise UsageError(text)
            warn(f"{text} Training continues without")


def _is_validated_later(run: Run) -> bool:
    """True if this fit has not validated yet, and will."""
    every, end = run.plan.options.check_val_every_n_epoch, run.plan.options.max_epochs
    comes = every is None or end == -1 or every <= end
    return bool(run.stages["validate"].loaders) and run.loop.validated is None and comes
