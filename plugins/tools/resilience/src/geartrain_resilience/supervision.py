"""The process that runs the command, and runs it again after a failure.

It does not use torch.distributed.elastic: elastic's agent starts ranks, and here one command starts
them itself; it would also replace this process's signal handlers for good, and wait 30 seconds for
a rank that hangs. The report of a rank's error has elastic's format (``geartrain-parallel``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from geartrain.plugin_api import START_DIRECTORY
from geartrain_parallel import Patience, describe_exit
from geartrain_parallel.supervisor import is_stopped
from geartrain_resilience import PREEMPTED
from geartrain_resilience.exchange import VARIABLE, Attempt, Report, Steps
from geartrain_resilience.processes import adopt_orphans, children, end_orphans

#: Signals that are passed on to the run. After one of them the run is not started again.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
#: Exit codes of a run that is not started again, as one that was pre-empted: done, wrong usage.
DONE, WRONG_USAGE = 0, 2
_FAILED = 1
#: The most seconds between two looks whether the run is stopped.
_PERIOD = 0.5


@dataclass(frozen=True, slots=True)
class Failure:
    """How an attempt failed."""

    #: Such as ``"rank 1 was ended by SIGSEGV"``.
    text: str
    #: The step in which it failed, from 1.
    step: int
    #: True if the same failure in the same step means that a restart does not help.
    may_repeat: bool

    def is_repeated(self, before: Failure | None) -> bool:
        """True if the attempt before failed in the same way in the same step."""
        return (
            before is not None
            and self.may_repeat
            and (_comparable(self.text), self.step) == (_comparable(before.text), before.step)
        )

    def __str__(self) -> str:
        return f"{self.text} in step {self.step}" if self.step else f"{self.text} before step 1"


@dataclass(frozen=True, slots=True)
class _Started:
    """A process of one attempt."""

    process: subprocess.Popen[bytes]
    #: The file for its standard output, if that is kept.
    out: IO[bytes] | None
    #: The end of a pipe: it waits until it reads its attempt there.
    turn: int | None
    #: The program's files when it was started, if it waits.
    files: Mapping[str, tuple[int, int]]

    def close(self) -> None:
        """Kill the process if it waits, and close the files."""
        if self.turn is not None:
            self.process.kill()
            self.process.wait()
            os.close(self.turn)
        if self.out is not None:
            self.out.close()


class Supervisor:
    """Runs a command, and runs it again after a failure.

    While an attempt trains, the process of the next one imports, plans and waits. So a restart
    does not wait for imports, which take most of its time. If a file of the program was edited
    since then, a new process starts: rank 0 would run the old code, and the other ranks the new.

    Args:
        command: the command.
        limit: the most restarts.
        output: the run's folder.
        ranks: the number of ranks.
        max_steps: of the plan; a run that has done them is not started again.
        lines: the lines of each file of metrics before the first attempt.
        stdout: a descriptor to which only the last attempt's standard output is written; ``None``:
            all attempts write to this process's.
    """

    def __init__(
        self,
        command: list[str],
        limit: int,
        output: Path,
        ranks: int,
        max_steps: int,
        lines: dict[str, int],
        stdout: int | None = None,
    ) -> None:
        self._command, self._limit, self._ranks = command, limit, ranks
        self._max_steps, self._stdout = max_steps, stdout
        self._output, self._lines = output, lines
        self._folder = Path(tempfile.mkdtemp(prefix="geartrain-restarts-"))
        #: The signals that this process got.
        self._received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        #: The process that waits.
        self._next: _Started | None = None

    def run(self) -> int:
        """Run the command until it is done, or restarts do not help.

        Returns:
            The exit code.
        """
        adopt_orphans()
        kept = children()
        attempt = Attempt(
            self._command[1:],
            {"output": str(self._output)},
            str(self._folder),
            os.getpid(),
            limit=self._limit,
            lines=self._lines,
        )
        before: Failure | None = None
        try:
            with self._passed_on():
                while True:
                    code, steps = self._run_once(attempt)
                    if code != DONE:
                        end_orphans([*kept, *([self._next.process.pid] if self._next else [])])
                    report = Report.read(self._folder)
                    if code in (DONE, WRONG_USAGE, PREEMPTED):
                        return code
                    if self._received or (report is not None and report.interrupted):
                        return _FAILED
                    if self._is_over(steps):
                        _say("training was over: the run is not started again")
                        return _FAILED
                    failure = _failure(code, report, steps, self._was_stopped)
                    if failure.is_repeated(before):
                        _say(
                            f"{failure}, for the second time: the same failure in the same step "
                            "does not go away by more restarts, so the run ends"
                        )
                        return _FAILED
                    if attempt.number == self._limit:
                        _say(f"{failure}. The run ends: it was started again {self._limit} times")
                        return _FAILED
                    before = failure
                    attempt = replace(_after(attempt), failure=str(failure))
        finally:
            if self._next is not None:
                self._next.close()
            adopt_orphans(False)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run_once(self, attempt: Attempt) -> tuple[int, list[int]]:
        """Return the exit code, and the steps of each rank."""
        steps = Steps(self._folder, self._ranks)
        started = self._take_turn(attempt) or self._start(attempt)
        try:
            self._process = started.process
            for number in self._received:  # since the last attempt
                self._process.send_signal(number)
            code = self._wait(attempt, self._process, steps)
            if started.out is not None:
                started.out.seek(0)
                self._result = started.out.read()
            return code, steps.read()
        finally:
            self._process = None
            steps.close()
            started.close()

    def _start(self, attempt: Attempt, waits: bool = False) -> _Started:
        files = _files(self._command) if waits else {}
        out = None if self._stdout is None else tempfile.TemporaryFile()  # noqa: SIM115
        reader, writer = os.pipe() if waits else (None, None)
        process = subprocess.Popen(
            self._command,
            cwd=START_DIRECTORY,
            env={**os.environ, **replace(attempt, turn=reader).variable()},
            stdout=out,
            pass_fds=() if reader is None else (reader,),
            start_new_session=True,  # so that Ctrl-C reaches it once, from this process
        )
        if reader is not None:
            os.close(reader)
        return _Started(process, out, writer, files)

    def _take_turn(self, attempt: Attempt) -> _Started | None:
        """Let the process that waits make this attempt; ``None`` if none can."""
        waiting, self._next = self._next, None
        if waiting is None or waiting.turn is None:
            return None
        if not waiting.files.items() <= _files(self._command).items():  # edited since then
            waiting.close()
            return None
        try:
            os.write(waiting.turn, attempt.variable()[VARIABLE].encode())
        except BrokenPipeError:  # it has failed; a new process shows the error
            waiting.close()
            return None
        os.close(waiting.turn)
        return replace(waiting, turn=None)

    def _wait(self, attempt: Attempt, process: subprocess.Popen[bytes], steps: Steps) -> int:
        """Wait for the run, and kill it if it was stopped (SIGSTOP) for long; return its code.

        The ranks that the run has started are watched by the run itself.
        """
        self._was_stopped, patience, stopped = False, Patience.from_environment(), 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_PERIOD)
            if self._next is None and attempt.number < self._limit and any(steps.read()):
                self._next = self._start(_after(attempt), waits=True)
            stopped = stopped + _PERIOD if is_stopped(process.pid) else 0.0
            if stopped >= patience.stopped:
                self._was_stopped = True
                process.kill()
                return process.wait()

    #: True if the last attempt was killed because it was stopped.
    _was_stopped = False
    #: The standard output of the last attempt, if it is kept.
    _result = b""

    def print_result(self) -> None:
        """Write the standard output of the last attempt, if it was kept."""
        if self._stdout is not None:
            remaining = memoryview(self._result)
            while remaining:
                remaining = remaining[os.write(self._stdout, remaining) :]

    def _is_over(self, steps: list[int]) -> bool:
        """True if the run had done ``max_steps``, or says that it is done."""
        if self._max_steps > 0 and max(steps) >= self._max_steps:
            return True
        try:
            summary = json.loads((self._output / "summary.json").read_text(encoding="utf-8"))
            return max(steps) > 0 and bool(summary["status"] == "done")
        except (OSError, ValueError, LookupError, TypeError):
            return False

    @contextmanager
    def _passed_on(self) -> Iterator[None]:
        """Pass signals on to the run, inside the block. Signals that are ignored stay ignored."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self._received.append(number)
            process = self._process
            if process is not None and process.returncode is None:
                process.send_signal(number)

        before: dict[int, Any] = {}
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _after(attempt: Attempt) -> Attempt:
    """Return the attempt after this one; its failure is not known yet."""
    options = {**attempt.options, "resume": "auto"}
    return replace(attempt, number=attempt.number + 1, options=options)


def _files(command: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return time and size of the code that a command has imported, and of files of options.

    This process has imported the same: it began with the same command.
    """
    named = [argument.rpartition("=")[2] for argument in command]
    paths: set[Any] = {path for path in named if path.endswith((".json", ".py", ".yaml", ".yml"))}
    for module in list(sys.modules.values()):
        paths.add(getattr(module, "__dict__", {}).get("__file__"))
    found: dict[str, tuple[int, int]] = {}
    for path in paths - {None}:
        with suppress(OSError):  # of a frozen module, or removed
            facts = os.stat(os.path.join(START_DIRECTORY, path))
            found[path] = facts.st_mtime_ns, facts.st_size
    return found


def _failure(code: int, report: Report | None, steps: list[int], was_stopped: bool) -> Failure:
    if was_stopped:
        return Failure("rank 0 was stopped (SIGSTOP)", steps[0] + 1, False)
    if report is None:
        rank, done = 0, steps[0]
        text = f"rank 0 {describe_exit(code)}"
    else:
        rank = report.rank or 0
        done = steps[min(rank, len(steps) - 1)]
        text = report.error
        if not re.match(r"ranks? \d", text):
            text = f"rank {rank} failed: {text}"
    # Another process sends SIGKILL and SIGTERM: such a failure says nothing about the next attempt.
    from_outside = re.search(r"ended by SIG(KILL|TERM|HUP)|\(SIGSTOP\)", text) is not None
    return Failure(text, done + 1 if any(steps) else 0, not from_outside)


def _comparable(text: str) -> str:
    """Return a failure without what differs between two processes: addresses and process ids."""
    return re.sub(r"0x[0-9a-f]+|\bpid \d+|process \d+|:\d{4,5}\b", "", text)


def _say(text: str) -> None:
    print(f"geartrain: {text}", file=sys.stderr, flush=True)
