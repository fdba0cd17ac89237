"""``timer``: end training after a time limit. ``Trainer(max_time=...)`` selects it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Literal

from geartrain import Run, UsageError, hookimpl
from geartrain_callbacks.callback import PluginCallback
from geartrain_callbacks.durations import Duration, seconds
from geartrain_callbacks.fresh_start import FreshStart
from geartrain_callbacks.stopping import ends, say, stop_together


class Timer(FreshStart, PluginCallback):
    """End training after a time limit, on all ranks in the same step.

    The first rank whose time is up informs the others. All stop at the next flush
    (``log_every_n_steps``, or the end of the epoch): steps before it are still done, and a running
    validation is finished. The clock starts at the set-up of the run, before the sanity check, and
    includes validation.

    Args:
        duration: ``"DD:HH:MM:SS"``, seconds, a ``timedelta``, or its arguments such as
            ``{"hours": 2, "minutes": 30}``.
        interval: check after every ``"step"``, or only after every ``"epoch"`` by rank 0's clock.

    Raises:
        UsageError: the duration cannot be read or is not above 0, or the interval is wrong.
    """

    #: A checkpoint holds rank 0's state.
    same_on_all_ranks = True

    def __init__(
        self,
        duration: Duration,
        interval: Literal["step", "epoch"] = "step",
    ) -> None:
        if interval not in ("step", "epoch"):
            raise UsageError(f"timer: interval={interval!r}. Fix: 'step' or 'epoch'")
        #: The limit in seconds.
        self.seconds, self.interval = seconds("timer: duration", duration), interval
        self._started: float | None = None
        self._said = False
        self.forget()

    def forget(self) -> None:
        self._before = self._elapsed = 0.0

    def time_elapsed(self) -> float:
        """Return the seconds trained, including those of a loaded state."""
        if self._started is None:
            return self._elapsed
        return self._before + time.monotonic() - self._started

    def time_remaining(self) -> float:
        """Return the seconds left; 0 when the time is up."""
        return max(0.0, self.seconds - self.time_elapsed())

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._started = time.monotonic() if run.command == "fit" else None
        self._said = False
        resumed = run.loop.resumed
        from_file = resumed is not None and resumed.path is not None  # others go on with one rank
        if from_file and self._stop_if_over(run):  # it was over in the checkpoint
            self._said = True
            say(run, f"timer: {timedelta(seconds=self.seconds)} are over.")

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        if self.interval == "step" and not run.should_stop and self.time_elapsed() >= self.seconds:
            run.should_stop = True  # the flush informs the other ranks

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        if self._stop_if_over(run) or run.logs.stop:
            self._say(run)

    @hookimpl
    def on_run_end(self) -> None:
        self._pause()

    @hookimpl(specname="on_exception")
    def _on_exception(self) -> None:
        self._pause()

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": self.time_elapsed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = self._elapsed = state["time_elapsed"]

    def _stop_if_over(self, run: Run) -> bool:
        up = self.time_elapsed() >= self.seconds
        if run.world.size > 1:  # the ranks' clocks differ, and the epoch's last flush is over
            up = run.hooks.broadcast(run=run, obj=up, src=0)
        if up:
            stop_together(run)
        return up

    def _pause(self) -> None:
        if self._started is not None:
            self._elapsed, self._started, self._before = self.time_elapsed(), None, 0.0

    def _say(self, run: Run) -> None:
        if not self._said and self.time_elapsed() >= self.seconds:
            self._said = True
            say(run, f"timer: {timedelta(seconds=self.seconds)} are over. {ends(run)}")
