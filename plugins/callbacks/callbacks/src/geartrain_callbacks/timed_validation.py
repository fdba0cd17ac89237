"""``timed_validation``: validate after a time. A time as ``val_check_interval`` selects it."""

from __future__ import annotations

import time
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import torch

from geartrain import Run, hookimpl


class TimedValidation:
    """Lets all ranks validate if the interval has passed on one of them since the last validation.

    Ranks agree at each flush (``log_every_n_steps``) and at the end of an epoch.
    """

    added_for = "a time as val_check_interval"

    def __init__(self) -> None:
        #: ``time.monotonic()`` after the last validation, or when training began.
        self.validated_at = 0.0

    @hookimpl
    def on_train_start(self, run: Run) -> None:
        self.validated_at, run.loop.validation_is_due = time.monotonic(), self._is_due

    @hookimpl(wrapper=True)
    def on_validation_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if run.stage == "validate":
            self.validated_at = time.monotonic()
        return results

    def _is_due(self, run: Run) -> bool:
        """True on every rank if the time is up on one of them; also after the validation there."""
        if run.loop.validated == (run.epoch, run.batch_idx):
            return True
        interval = run.plan.options.val_check_interval
        assert isinstance(interval, timedelta)
        up = time.monotonic() - self.validated_at >= interval.total_seconds()
        values = torch.tensor([up], dtype=torch.float64)
        return bool(run.hooks.log_sync(run=run, values=values).any())
