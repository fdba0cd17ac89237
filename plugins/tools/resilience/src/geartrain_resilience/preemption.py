"""``preemption``: save and end when a scheduler says that the machine is needed elsewhere."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from geartrain import Plan, Run, UsageError, hookimpl
from geartrain.plugin_api import ClusterEnvironment, PluginInfo, detect
from geartrain_parallel import ERROR_FILE
from geartrain_resilience import PREEMPTED

_LABEL = "geartrain-resilience[preemption]"
#: Signals that may ask a run to end, as users write them.
_KNOWN = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
#: A second signal within these seconds is the same: schedulers signal a process and its parent.
_SAME = 0.5
#: Seconds that another rank waits for the end of rank 0, whose error the user shall see.
_FIRST = 1.0
#: The most steps between two agreements.
_MOST_STEPS = 1000


class Preempted(KeyboardInterrupt, SystemExit):
    """The run was saved and ends, because a signal asked for it; exit code 75.

    Args:
        name: of the signal.
        step: optimizer steps done.
        path: the checkpoint.
    """

    def __init__(self, name: str, step: int, path: str) -> None:
        super().__init__(f"{name}: saved after step {step} in {path}")
        self.code = PREEMPTED
        self.signal_name = name
        self._arguments = (name, step, path)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments


class _SignalledAgain(KeyboardInterrupt):
    """A second signal ends the run without saving."""

    signal_name = ""


class Preemption:
    """Save ``last.ckpt`` when a signal arrives, at the next step on which all ranks agree, and end.

    Every rank takes part in the agreement, a collective about every ``seconds`` of training. The
    process ends with exit code 75. A second signal ends it at once.

    Args:
        signals: names of signals.
        seconds: of training between two agreements; on one rank each step.

    Raises:
        UsageError: an unknown signal, or ``seconds`` is not above 0.
    """

    def __init__(
        self, signals: Sequence[str] = ("SIGTERM", "SIGUSR1"), seconds: float = 1.0
    ) -> None:
        names = [signals] if isinstance(signals, str) else list(signals)
        if unknown := [name for name in names if name not in _KNOWN]:
            raise UsageError(
                f"{_LABEL}: signals={unknown[0]!r} is none of {', '.join(_KNOWN)}. "
                "Fix: use one of them"
            )
        if not names:
            raise UsageError(f"{_LABEL}: signals is empty. Fix: name a signal, or leave it out")
        if not seconds > 0:
            raise UsageError(f"{_LABEL}: seconds={seconds!r} must be above 0.")
        self.signals, self.seconds = tuple(names), seconds
        self._reset()

    def _reset(self) -> None:
        #: The signal that this process got, and when.
        self._asked, self._asked_at = "", 0.0
        #: The checkpoint was saved: the run ends.
        self._preempted: Preempted | None = None
        #: Another rank: its starter asks it to end.
        self._told = False
        #: A file that asks all ranks to end: a process that is no rank writes it.
        self._request: Path | None = None
        self._handles = False

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if plan.output is None and not plan.options.fast_dev_run:
            raise UsageError(
                f"{_LABEL} saves the run in its folder, and it has none. Fix: --output DIR"
            )

    # --- signals ----------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._preempted is not None:
            self._told = True
            return
        if self._asked:
            if time.monotonic() - self._asked_at < _SAME:
                return
            error = _SignalledAgain("a second signal: ended without saving")
            error.signal_name = signal.Signals(number).name
            raise error
        self._asked, self._asked_at = signal.Signals(number).name, time.monotonic()
        if self._request is not None:
            with suppress(OSError):
                self._request.write_text(self._asked, encoding="utf-8")

    def _handle(self) -> dict[int, Any]:
        """Install the handlers in this process, once; return the earlier ones."""
        if self._handles or threading.current_thread() is not threading.main_thread():
            return {}
        self._handles = True
        numbers = [getattr(signal, name) for name in self.signals if hasattr(signal, name)]
        return {number: signal.signal(number, self._on_signal) for number in numbers}

    @hookimpl(wrapper=True)
    def launch(self, run: Run) -> Generator[None, Any, Any]:
        if run.command != "fit" or run.output is None or run.plan.options.fast_dev_run:
            return (yield)
        self._reset()
        self._request = run.output / "preempt"
        if ClusterEnvironment.starts_rank_0(detect(), run.plan.num_nodes):
            for path in (self._request, _mark(run.output)):
                path.unlink(missing_ok=True)
        before = self._handle()
        try:
            return (yield)
        except BaseException:
            error = self._preempted or _read(_mark(run.output))
            if error is None:
                raise
            raise error from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._handles = False

    @hookimpl(wrapper=True)
    def setup_device(self, run: Run) -> Generator[None, Any, Any]:
        if run.command == "fit" and run.output and not run.plan.options.fast_dev_run:
            self._request = run.output / "preempt"
            self._handle()  # in a rank that was started on a function
            # The last to be registered is the outermost: it saves what all others did in the step.
            run.hooks.add(_Agreement(self), PluginInfo("preemption", "core", None, None, ""))
        return (yield)

    # --- each rank --------------------------------------------------------------------------------

    def is_asked(self) -> bool:
        """True if this rank knows of a signal."""
        return bool(self._asked) or (self._request is not None and self._request.exists())

    def end(self, run: Run) -> None:
        """Save the run, on every rank in the same step.

        Raises:
            Preempted: it is saved.
        """
        assert run.output is not None
        path, name = run.output / "last.ckpt", self._asked
        run.save_checkpoint(run.checkpoint(run.epoch), path)
        if run.world.rank == 0:
            if not name and self._request is not None:
                with suppress(OSError):
                    name = self._request.read_text(encoding="utf-8").strip()
            name = name or "another rank's signal"
            facts = {"signal": name, "step": run.step, "path": str(path)}
            _mark(run.output).write_text(json.dumps(facts), encoding="utf-8")
            if self._request is not None:
                self._request.unlink(missing_ok=True)
            text = f"geartrain: {name}: saved after step {run.step} in {path}. The run ends"
            print(text, file=sys.stderr, flush=True)
        self._preempted = Preempted(name or "another rank's signal", run.step, str(path))
        if run.world.rank and ERROR_FILE in os.environ:
            deadline = time.monotonic() + _FIRST
            while not self._told and time.monotonic() < deadline:
                time.sleep(0.01)
        raise self._preempted


class _Agreement:
    """Lets all ranks agree whether a rank got a signal.

    Each rank sends whether it did, and the time of its steps. So all compute the same number of
    steps until the next agreement.
    """

    def __init__(self, plugin: Preemption) -> None:
        self._plugin = plugin
        self._next = self._step = 0
        self._time = time.monotonic()

    @hookimpl
    def on_train_start(self, run: Run) -> None:
        self._next, self._step, self._time = run.step + 1, run.step, time.monotonic()

    @hookimpl(wrapper=True)
    def on_step_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if run.step >= self._next or (run.world.size == 1 and self._plugin._asked):
            self._agree(run)
        return results

    def _agree(self, run: Run) -> None:
        clock = time.monotonic()
        took = (clock - self._time) / max(1, run.step - self._step)
        values = torch.tensor([float(self._plugin.is_asked()), took], dtype=torch.float64)
        asked, times = run.hooks.log_sync(run=run, values=values).T.tolist()
        self._step, self._time = run.step, clock
        self._next = run.step + max(1, min(_MOST_STEPS, int(self._plugin.seconds / max(times))))
        if any(asked) and run.step != run.plan.options.max_steps:
            self._plugin.end(run)


def _mark(output: Path) -> Path:
    return output / "preempted.json"


def _read(path: Path) -> Preempted | None:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return Preempted(facts["signal"], facts["step"], facts["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
