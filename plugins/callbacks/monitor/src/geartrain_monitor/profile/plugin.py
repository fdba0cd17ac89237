"""The plugin ``profile``."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from geartrain import TrainingError, UsageError, hookimpl
from geartrain.plugin_api import replacing, warn
from geartrain_monitor.capture import Reason, watched
from geartrain_monitor.profile.clock import Clock, Reading, TimedBatches
from geartrain_monitor.profile.report import COLLATE, PARTS, as_dict, make_report, table
from geartrain_monitor.profile.trace import Recorder, merge
from geartrain_monitor.profile.verdict import verdict
from geartrain_monitor.profile.wrapping import wrap_implementations

if TYPE_CHECKING:
    from geartrain import Plan, Run

_WHOSE = "geartrain-monitor[profile]"
_COLLATION = ("DataLoader", COLLATE)
#: Hooks of core's defaults that do nothing: a timer around them would cost more than they do.
_EMPTY = ("micro_step", "reduce_gradients", "clip_gradients")
#: ``step`` contains the other hooks of a step; ``device_stats`` runs in other threads.
_NOT_TIMED = ("step", "device_stats", "launch")


@dataclass(slots=True)
class _State:
    """The measurement of one run."""

    clock: Clock = field(default_factory=Clock)
    #: True while the clock runs: from ``on_run_start`` to the end of the run.
    running: bool = False
    #: ``run.step`` and the clock after the first step of the run, which also initialises torch.
    first: tuple[int, Reading] | None = None
    #: The clock at the start of the recording, and of the running evaluation.
    recording: Reading | None = None
    evaluation: Reading | None = None
    recorder: Recorder | None = None
    #: Steps that the trace slowed down.
    recorded: int = 0
    first_step: int = 0
    validations: int = 0
    validation_seconds: float = 0.0
    #: Lines of the first step that wait for the device.
    reasons: Iterable[Reason] = ()


class Profile:
    """Print the time of each part of a step, and write ``profile.json`` and ``trace.json.gz``.

    Times are those of each process on the CPU. A GPU works in parallel: the loop waits for it in
    ``logging``, in ``backward`` or wherever its result is read; the trace shows its kernels. The
    first step, which initialises torch, and the steps of the trace are not in the table.

    A run without a folder writes no files. A folder that has these files gets ``profile-2.json``
    and ``trace-2.json.gz``.

    Args:
        trace: record a few steps of ``fit`` with ``torch.profiler``.
        wait: steps before the trace.
        warmup: steps that the profiler runs before it records.
        active: steps that it records.

    Raises:
        UsageError: ``wait``, ``warmup`` or ``active`` is wrong.
    """

    def __init__(
        self, trace: bool = True, wait: int = 10, warmup: int = 2, active: int = 3
    ) -> None:
        for name, value, least in (("wait", wait, 1), ("warmup", warmup, 0), ("active", active, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                message = f"{_WHOSE}: {name}={value!r} is not a number of steps"
                raise UsageError(f"{message}. Fix: use a whole number, at least {least}")
        self.trace, self.wait, self.warmup, self.active = trace, wait, warmup, active
        self._state: _State | None = None

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if plan.output is None and not plan.options.fast_dev_run:
            message = f"{_WHOSE}: the run has no folder, so it only prints its table"
            warn(f"{message}. Fix: --output DIR for profile.json and a trace")

    # --- measure ----------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def setup_device(self, run: Run) -> Generator[None, Any, Any]:
        self._state = state = _State()
        clock, hooks = state.clock, run.hooks
        clock.slot(*_COLLATION)  # before the clock starts
        empty = [hook for hook in _EMPTY if hooks.is_default(hook)]

        def timed(
            function: Callable[..., Any], impl: Any, hook: str, label: str
        ) -> Callable[..., Any]:
            if impl.plugin is self or hook in (*_NOT_TIMED, *empty):
                return function
            timer = clock.wrapper_timer if impl.wrapper else clock.timer
            return timer(function, label, hook)

        wrap_implementations(hooks, timed)
        return (yield)

    @hookimpl(wrapper=True)
    def on_run_start(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if (state := self._state) is not None:
            logs: Any = run.logs
            for name in ("flush", "end_epoch"):
                setattr(
                    logs,
                    name,
                    state.clock.timer(getattr(logs, name), "geartrain[metrics]", "flush"),
                )
            if run.output is not None:
                with suppress(OSError):  # a killed run's
                    _rank_file(run.output, run.world.rank).unlink(missing_ok=True)
            state.clock.start()
            state.running, state.first_step = True, run.step
        return results

    @hookimpl(wrapper=True)
    def device_batches(
        self, run: Run, loader: Iterable[Any]
    ) -> Generator[None, Any, Iterator[Any]]:
        batches: Iterator[Any]
        if self._state is None:
            batches = yield
            return batches
        with _timed_collation(loader, self._state.clock):
            batches = yield
        return TimedBatches(batches, loader, self._state.clock)

    @hookimpl(wrapper=True)
    def step(self) -> Generator[None, Any, Any]:
        if self._state is None or self._state.first is not None:
            return (yield)
        with watched() as self._state.reasons:  # the first step is in no table
            result = yield
        return result

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        state = self._state
        if state is None:
            return
        if state.first is None:
            state.first = run.step, state.clock.read()
        if state.recorder is not None:
            state.recorded += 1
            goes_on = False
            with _warned("the trace is lost"):
                goes_on = state.recorder.step()
            if not goes_on:
                self._stop_recording(state)
        elif run.step - state.first_step == self.wait and self._records(run):
            assert run.output is not None
            path = _rank_file(run.output, run.world.rank)
            state.recording = state.clock.read()
            with _warned("there is no trace"):
                state.recorder = Recorder(run, path, self.warmup, self.active)

    def _records(self, run: Run) -> bool:
        return self.trace and run.output is not None and not run.plan.options.fast_dev_run

    def _stop_recording(self, state: _State) -> None:
        """Forget the times of the recorded steps."""
        state.recorder = None
        if state.recording is not None:
            state.clock.set_back(state.recording)
            state.recording = None

    @hookimpl(wrapper=True)
    def on_validation_start(self, run: Run) -> Generator[None, Any, Any]:
        if (state := self._state) is not None and run.command == "fit":
            state.evaluation = state.clock.read()
        return (yield)

    @hookimpl(wrapper=True)
    def on_validation_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if (state := self._state) is not None and state.evaluation is not None:
            taken = state.clock.set_back(state.evaluation)
            state.evaluation = None
            if run.stage == "validate" and state.recorder is None:
                state.validations += 1
                state.validation_seconds += taken.wall
        return results

    # --- report -----------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def on_run_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        self._finish(run, all_ranks=True)
        return results

    @hookimpl(wrapper=True)
    def on_exception(self, run: Run) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            self._finish(run, all_ranks=False)

    @hookimpl(wrapper=True)
    def teardown_device(self) -> Generator[None, Any, Any]:
        self._state = None
        return (yield)

    def _finish(self, run: Run, all_ranks: bool) -> None:
        """Print the table and write the files; after a failure without the other ranks."""
        state = self._state
        if state is None or not state.running:
            return
        self._state, end = None, state.clock.read()
        if state.recorder is not None:
            with _warned("the trace is lost"):
                state.recorder.stop()
            end = state.recording or end
        elif state.evaluation is not None:  # an error in a validation
            end = state.evaluation
        first, reading = state.first, end
        unit, count = "step", run.step - state.first_step - state.recorded
        if run.command != "fit":
            unit, slots = "batch", state.clock.slots
            pairs = zip(slots, end.calls, strict=True)
            owner = run.hooks.owner("forward")
            label = owner.label if owner else ""
            count = sum(calls for slot, calls in pairs if slot == (label, "forward"))
        elif first is not None and count > 1:
            count, reading = count - 1, end - first[1]
        report = make_report(unit, count, reading, state.clock.slots)
        ranks = [report.parts]
        if all_ranks and run.world.size > 1:
            times = torch.tensor([report.parts[name] for name in PARTS], device=run.device)
            everyone = run.hooks.all_gather(run=run, tensor=times)
            ranks = [dict(zip(PARTS, row.tolist(), strict=True)) for row in everyone]
            run.hooks.barrier(run=run)  # every rank has written its trace
        if run.world.rank == 0:
            validation_ms = 1000 * state.validation_seconds / max(state.validations, 1)
            loader = next(iter(run.current_stage.loaders), None)
            sentences = verdict(report, getattr(loader, "num_workers", None), state.reasons)
            facts = (report, ranks, state.validations, validation_ms, sentences)
            print(table(*facts))
            if run.world.size > len(ranks):
                print("  the other ranks are missing, because the run failed")
            if run.output is not None and not run.plan.options.fast_dev_run:
                self._write(run, as_dict(*facts), run.output)

    def _write(self, run: Run, facts: dict[str, Any], folder: Path) -> None:
        number = 1
        while any(
            _numbered(folder, name, number).exists() for name in ("profile.json", "trace.json.gz")
        ):
            number += 1
        with _warned("profile.json is not written"):
            file = _numbered(folder, "profile.json", number)
            with replacing(file) as new:
                new.write(f"{json.dumps(facts, indent=2)}\n".encode())
            print(f"  written: {file}")
        traces = {rank: _rank_file(folder, rank) for rank in range(run.world.size)}
        missing = [rank for rank, file in traces.items() if not file.exists()]
        if len(missing) < len(traces):
            with _warned("the traces of the ranks stay separate"):
                file = _numbered(folder, "trace.json.gz", number)
                merge({rank: f for rank, f in traces.items() if rank not in missing}, file)
                print(f"  written: {file}, for ui.perfetto.dev")
                if missing:
                    print(f"  without ranks {', '.join(map(str, missing))}: no file of theirs here")
        elif self.trace:
            print(f"  no trace: it needs more than {self.wait + self.warmup} steps of a fit")


@contextmanager
def _timed_collation(loader: Any, clock: Clock) -> Iterator[None]:
    """Count the time in a loader's ``collate_fn``, unless workers call it."""
    collate = getattr(loader, "collate_fn", None)
    if collate is None or getattr(loader, "num_workers", None) != 0:
        yield
        return
    loader.collate_fn = clock.timer(collate, *_COLLATION)
    try:
        yield  # a DataLoader reads the attribute when a pass begins
    finally:
        loader.collate_fn = collate


@contextmanager
def _warned(what: str) -> Iterator[None]:
    """Make an error a warning, because the run itself succeeded."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, TrainingError) as error:
        warn(f"{_WHOSE}: {what}: {error}")


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"trace-rank-{rank}.json.gz"


def _numbered(folder: Path, name: str, number: int) -> Path:
    """Return ``profile.json``, or ``profile-2.json`` for the second."""
    stem, dot, ending = name.partition(".")
    return folder / (name if number == 1 else f"{stem}-{number}{dot}{ending}")
