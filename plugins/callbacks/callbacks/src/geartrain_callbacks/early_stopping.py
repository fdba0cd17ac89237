"""``early_stopping``: end training when a metric no longer gets better."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Literal

from geartrain import Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import warn
from geartrain_callbacks.callback import PluginCallback
from geartrain_callbacks.fresh_start import FreshStart
from geartrain_callbacks.monitoring import check_mode, is_better, looks_after_epochs, not_logged
from geartrain_callbacks.stopping import ends, say, stop_together


class EarlyStoppingReason(Enum):
    """Why :class:`EarlyStopping` ended training."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


#: A reason and its message.
_Verdict = tuple[EarlyStoppingReason, str]
_CONTINUE: _Verdict = (EarlyStoppingReason.NOT_STOPPED, "")


class EarlyStopping(FreshStart, PluginCallback):
    """End training when a metric stops improving. Options are named as in PyTorch Lightning.

    All ranks use rank 0's value, so they stop together even if the metric is logged without
    ``sync_dist``. Training ends at once. Each value counts once: an epoch that does not log the
    metric is not a check. A ``fit`` that does not resume counts from scratch. One that resumes
    where training ended ends again, unless other arguments let it continue.

    Args:
        monitor: the metric's name.
        min_delta: a smaller change is not an improvement.
        patience: checks without improvement before training ends.
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is better.
        check_finite: end training when the metric is NaN or infinite.
        stopping_threshold: end training once the metric is better than this.
        divergence_threshold: end training once the metric is worse than this.
        check_on_train_epoch_end: check after each epoch; ``False``: after each validation.
            Default: after each epoch if validation is off or runs at each epoch's end; otherwise
            after each validation.
        strict: raise if the metric was not logged; ``False``: warn once.
        verbose: print a line when the metric improves.

    Raises:
        UsageError: ``mode``, ``patience`` or ``min_delta`` is wrong; or checks are due after
            validation, and the run has none.
        TrainingError: the metric was not logged.
    """

    #: A checkpoint holds rank 0's state.
    same_on_all_ranks = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        strict: bool = True,
        verbose: bool = False,
    ) -> None:
        check_mode("early_stopping", mode, monitor)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 0:
            raise UsageError(
                f"early_stopping: patience={patience!r} must be a whole number of checks, "
                "at least 0."
            )
        if min_delta < 0:
            raise UsageError(f"early_stopping: min_delta={min_delta!r} must not be below 0.")
        self.monitor, self.min_delta, self.patience, self.mode = monitor, min_delta, patience, mode
        self.check_finite, self.strict, self.verbose = check_finite, strict, verbose
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._at_epoch_end = self._asked = self._warned = False
        self.forget()

    def forget(self) -> None:
        #: The best value so far.
        self.best_score = math.inf if self.mode == "min" else -math.inf
        #: The epoch and step of the value checked last: each value counts once.
        self._checked: tuple[int, int] | None = None
        self._value: float | None = None
        #: Checks since the best value.
        self.wait_count = 0
        #: The epoch (from 0) in which it ended training; 0 also if it did not.
        self.stopped_epoch = 0
        #: Why it ended training.
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        #: The same as a sentence; ``None`` if it did not end training.
        self.stopping_reason_message: str | None = None

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._asked = False
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message = None
        if run.command == "fit":
            self._at_epoch_end = looks_after_epochs(
                run, self._check_on_train_epoch_end, "early_stopping", "check_on_train_epoch_end"
            )
            if run.loop.resumed is not None and self._value is not None:
                self._stop(run, self._limits_or_patience(self._value))

    @hookimpl(specname="on_validation_end")
    def _on_validation_end(self, run: Run) -> None:
        if run.command == "fit" and run.stage == "validate" and not self._at_epoch_end:
            self._check(run)

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        if self._at_epoch_end:
            self._check(run)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "checked": self._checked,
            "value": self._value,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count. ``patience`` is not restored: a resumed run may wait longer."""
        self.wait_count, self.stopped_epoch = state["wait_count"], state["stopped_epoch"]
        self.best_score = state["best_score"]
        self._checked = None if state.get("checked") is None else tuple(state["checked"])
        self._value = state.get("value")

    def _check(self, run: Run) -> None:
        if self._asked:
            return
        value, when, known = run.logs.newest(self.monitor)
        if value is None:
            self._missing(known)
            return
        if when == self._checked:
            return
        self._checked, self._value = when, value
        verdict = self._judge(run, value)
        if verdict != _CONTINUE:
            self.stopped_epoch = run.epoch
        self._stop(run, verdict, ends(run))

    def _stop(self, run: Run, verdict: _Verdict, when: str = "") -> None:
        reason, message = verdict
        if message:
            self._asked = True
            self.stopping_reason, self.stopping_reason_message = reason, message
            stop_together(run)
            say(run, f"early_stopping: {message} {when}".rstrip())

    def _missing(self, known: list[str]) -> None:
        text = not_logged("early_stopping", self.monitor, known)
        if self.strict:
            raise TrainingError(f"{text} Fix: log it with self.log, or monitor another")
        if not self._warned:
            warn(f"{text} Training continues without")
            self._warned = True

    def _judge(self, run: Run, value: float) -> _Verdict:
        """Count a value; return whether and why training should end."""
        if (verdict := self._beyond_limits(value)) != _CONTINUE:
            return verdict
        delta = self.min_delta if self.mode == "max" else -self.min_delta
        if self._better(value, self.best_score + delta):
            if self.verbose:
                say(
                    run,
                    f"early_stopping: {self.monitor} went from {self.best_score:.6g} "
                    f"to {value:.6g}.",
                )
            self.best_score, self.wait_count = value, 0
            return _CONTINUE
        self.wait_count += 1
        return self._out_of_patience()

    def _limits_or_patience(self, value: float) -> _Verdict:
        verdict = self._beyond_limits(value)
        return verdict if verdict != _CONTINUE else self._out_of_patience()

    def _beyond_limits(self, value: float) -> _Verdict:
        if self.check_finite and not math.isfinite(value):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{self.monitor} = {value} is not finite."
        best, worst = self.stopping_threshold, self.divergence_threshold
        if best is not None and self._better(value, best):
            message = f"{self.monitor} = {value:.6g} is better than stopping_threshold={best}."
            return EarlyStoppingReason.STOPPING_THRESHOLD, message
        if worst is not None and self._better(worst, value):
            message = f"{self.monitor} = {value:.6g} is worse than divergence_threshold={worst}."
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, message
        return _CONTINUE

    def _out_of_patience(self) -> _Verdict:
        if self.wait_count < max(self.patience, 1):
            return _CONTINUE
        return (
            EarlyStoppingReason.PATIENCE_EXHAUSTED,
            f"{self.monitor} was not better than {self.best_score:.6g} "
            f"for {self.wait_count} checks.",
        )

    def _better(self, a: float, b: float) -> bool:
        return is_better(self.mode, a, b)
