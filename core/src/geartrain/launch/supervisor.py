"""Start this node's other ranks and watch them, while this process works as local rank 0.

Built on torch.distributed.elastic.multiprocessing, which starts, polls and ends the processes. What is added here is what it leaves
to its caller: rank 0 may be blocked in a collective, where no Python signal handler runs until the timeout, and where aborting the
group does not help; but ending its peers unblocks it within milliseconds. So a thread, woken by a worker's exit or by a signal,
ends the others, allows seconds to unwind, and keeps whose error came first.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from geartrain.errors import TrainingError
from geartrain.launch import bootstrap, rerun_command as relaunch
from geartrain.launch.failures import Failure, RankMonitor, judge
from geartrain.launch.forks import TEMPORARY, not_inherited, remove_temporary_folder
from geartrain.launch.patience import Patience
from geartrain.launch.reports import ERROR_FILE, failed_at, has_failed, is_telling, is_timeout
from geartrain.launch.signals import SIGNALS, raise_on_signals
from geartrain.launch.stopped_rank import StoppedRankMonitor, is_stopped

# elastic warns of every process that it is asked to end.
logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)

_exit = os._exit


@dataclass(frozen=True, slots=True)
class _Worker:
    """One of the other ranks."""

    number: int
    process: subprocess.Popen[bytes]
    error_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def error(self) -> Failure | None:
        return Failure.read(self.number, self.error_file)


class _Logs(LogsSpecs):
    """Where elastic puts errors; output goes to the rank's log, which the bootstrap opens."""

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        super().__init__()
        self._folder, self._ranks = folder, ranks

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        errors = {i: str(self._folder / f"rank-{rank}.error.json") for i, rank in enumerate(self._ranks)}
        for i, path in errors.items():
            Path(path).unlink(missing_ok=True)
            envs[i][ERROR_FILE] = path
        console = dict.fromkeys(envs, "")
        return LogsDest(stdouts=dict(console), stderrs=dict(console), error_files=errors)

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)


class Workers:
    """This node's other ranks.

    Args:
        environments: one for each rank to start, with its ``RANK``.
        logs: folder for ``rank-N.log``; a temporary one, removed after success, where it is ``None``.
    """

    def __init__(self, environments: list[Mapping[str, str]], logs: Path | None) -> None:
        command, self._patience = relaunch.command(), Patience.from_environment()  # first: they may refuse, and then nothing is left
        self.ranks = [int(environment["RANK"]) for environment in environments]
        #: Whether every rank of the program is on this node.
        self._are_all = {int(environment.get("WORLD_SIZE", 0)) for environment in environments} == {len(environments) + 1}
        self._temporary = logs is None
        self.logs = Path(tempfile.mkdtemp(prefix="geartrain-logs-")) if logs is None else logs.absolute()  # ranks start in another folder
        self.logs.mkdir(parents=True, exist_ok=True)
        log_paths = [str(self.logs / f"rank-{rank}.log") for rank in self.ranks]
        before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGQUIT)}
        # Not inherited: while elastic starts a process it has a handler of its own, which exec resets to the default.
        hangup = "ignore" if before[signal.SIGHUP] is signal.SIG_IGN else "keep"
        here = os.getcwd()
        os.chdir(relaunch.directory())
        try:
            self._context: PContext = start_processes(
                "geartrain",
                sys.executable,
                {i: ("-I", "-S", bootstrap.__file__, str(os.getpid()), path, hangup, *command) for i, path in enumerate(log_paths)},
                {i: {**environment, TEMPORARY: util.get_temp_dir()} for i, environment in enumerate(environments)},
                _Logs(self.logs, self.ranks),
            )
        finally:
            os.chdir(here)
            # elastic's start() replaces these for good.
            for number, handler in before.items():
                signal.signal(number, handler)
        handlers = self._context.subprocess_handlers  # type: ignore[attr-defined]
        self._workers = [_Worker(rank, handlers[i].proc, self._error_file(rank)) for i, rank in enumerate(self.ranks)]
        self._handles = {os.pidfd_open(worker.pid): worker.number for worker in self._workers}
        self._monitor = RankMonitor(self._workers, stopped := StoppedRankMonitor(self._patience.stopped))
        self._period = stopped.period
        self._lock = threading.Lock()
        self._reported = False

    # --- supervision -----------------------------------------------------------------------------------------------------

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """This rank does its own work while the others are watched.

        Raises:
            TrainingError: another rank failed first; it names the rank and shows its error and log.
            BaseException: this rank's own error.
        """
        if self._reported or self._monitor.is_ending:
            if not self._reported:
                self.show_logs()
            self._reported = True
            why = "".join(f"; {failure.describe()}" for failure in self._monitor.failures)
            raise TrainingError(f"the other ranks of this program were ended after a run that failed{why}. Fix: start the program again")
        over = threading.Event()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        with not_inherited(wake_read, wake_write), self._exits_fail():
            old_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
            watcher = threading.Thread(target=self._watch, args=(wake_read, over), name="geartrain-watch", daemon=True)
            watcher.start()
            try:
                with raise_on_signals():
                    yield
            except BaseException as error:
                self._raise_first_failure(error, failed_at())
                raise
            finally:
                over.set()
                with contextlib.suppress(OSError):  # full: the watcher wakes anyway; or closed, in a child that user code forked
                    os.write(wake_write, b"\0")  # closing would wake nobody while a child that was forked earlier holds a copy
                watcher.join()
                signal.set_wakeup_fd(old_wake)

    @contextmanager
    def _exits_fail(self) -> Iterator[None]:
        """Make ``os._exit(0)`` in this process fail: it skips all of Python, and the program would end as if the run had succeeded."""
        mine = os.getpid()

        def leave(status: int) -> NoReturn:
            if os.getpid() != mine:
                _exit(status)  # a forked child: multiprocessing ends each of them in this way
            try:
                if status == 0:
                    told = f"rank {min(self.ranks) - 1} left the program before the run ended (os._exit(0))"
                    print(f"geartrain: {told}", file=sys.stderr, flush=True)
                for handle in self._handles:  # not their process groups, in which multiprocessing's tracker has to clean up
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                    select.select([handle], [], [], self._patience.grace)
                remove_temporary_folder()
            finally:
                _exit(status or 1)

        before, os._exit = os._exit, leave
        try:
            yield
        finally:
            os._exit = before

    def _watch(self, wake: int, over: threading.Event) -> None:
        """Wait for a worker's exit, one that is stopped for too long, a signal to this process, or the end of the work."""
        poll = select.poll()
        for handle in (wake, *self._handles):
            poll.register(handle, select.POLLIN)
        while True:
            ready = [handle for handle, _ in poll.poll(self._period * 1000)]
            if over.is_set():
                return
            for handle in ready:
                if handle in self._handles:
                    poll.unregister(handle)
            failed = bool(self._collect())
            signalled = wake in ready and not set(os.read(wake, 64)).isdisjoint(SIGNALS)
            if failed or signalled:
                if failed and any(is_timeout(failure.message) for failure in self._monitor.failures):
                    self._wait_for_others()
                self.end()
                self._kill_if_stuck(over)
                return

    def _collect(self) -> list[Failure]:
        """Look which ranks have exited or are stopped; return new failures."""
        with self._lock:
            return self._monitor.look()

    def _kill_if_stuck(self, over: threading.Event) -> None:
        """End this process if it does not end by itself: its peers are dead, so any collective on rank 0 has failed. If rank 0 still
        works, it hangs in something else, and the process must end with the cause shown."""
        began, grace = time.monotonic(), self._patience.grace
        if over.wait(grace):
            return
        if not has_failed():  # a sleep or a Python loop hears this; a rank that tears down must not
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if over.wait(grace):
            return
        if is_telling():
            while is_telling() and time.monotonic() < began + self._patience.teardown:
                if over.wait(0.5):
                    return
            if over.wait(grace):
                return
        cause = "; ".join(failure.describe() for failure in self._monitor.failures) or "interrupted"
        took = time.monotonic() - began
        print(f"geartrain: {cause}. This rank did not come to an end within {took:.0f} s and is stopped.", file=sys.stderr)
        self.show_logs()
        sys.stderr.flush()
        remove_temporary_folder()
        _exit(1)

    def end(self) -> None:
        """End every worker: SIGTERM, seconds to unwind, SIGKILL; loader workers of theirs with them."""
        with self._lock:
            self._monitor.begin_end()
            running = self._monitor.running
            for worker in self._workers:
                if worker.number in running and is_stopped(worker.pid):
                    worker.process.kill()  # it hears nothing else; and those that wait for it hear nothing before it has gone
        grace: Any = self._patience.grace  # elastic says int, and only adds it to a time
        self._context.close(signal.SIGTERM, timeout=grace)

    # --- afterwards ------------------------------------------------------------------------------------------------------

    def _raise_first_failure(self, error: BaseException, failed_at: float) -> None:
        """This rank failed. If another rank is to blame, raise that instead: this rank's error is only the connection that was closed."""
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:
            # A worker that failed has closed its connections before it has exited; one that we failed needs a moment to tear down.
            # One that has written its error is on its way out, however slowly a busy machine lets it go.
            self._wait_for_others()
        self.end()
        self._reported = True
        own = Failure.of(min(self.ranks) - 1, failed_at, error)
        # Each rank that waited reports a timeout; the rank that they waited for reports nothing, or is this one.
        silent = self._monitor.silent or ([0] if self._are_all and not is_timeout(str(error)) else [])
        verdict = judge([*self._monitor.failures, *([] if interrupted else [own])], silent, self._monitor.succeeded)
        if verdict is None:
            return
        if verdict.late:
            raise TrainingError(verdict.describe()) from error
        if verdict.left:
            self.show_logs(verdict.left)
            raise TrainingError(verdict.describe()) from None
        if (rank := verdict.first.rank) != own.rank:
            self.show_logs([rank])
            raise TrainingError(f"{verdict.describe()}\n(its output: {self._log(rank)})") from None

    def _wait_for_others(self) -> None:
        """Wait until all have ended, for a moment; longer for a rank that has told its error."""
        deadline = time.monotonic() + self._patience.unwind
        longer = deadline + 2 * self._patience.grace
        while running := self._monitor.running:
            now = time.monotonic()
            if now >= deadline and (now >= longer or not any(self._error_file(rank).exists() for rank in running)):
                return
            self._collect()
            select.select([], [], [], 0.02)

    def _log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def _error_file(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.error.json"

    def show_logs(self, ranks: Sequence[int] | None = None, lines: int = 40) -> None:
        """Print the end of ranks' output."""
        for rank in ranks or [failure.rank for failure in self._monitor.failures]:
            path = self._log(rank)
            tail = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
            if tail:
                print(f"--- the end of rank {rank}'s output ---", *tail, f"--- {path} ---", sep="\n", file=sys.stderr)

    def finish(self, failed: bool) -> None:
        """Wait for the workers at the end of the program, whose script goes on after ``fit`` as ours does.

        Args:
            failed: whether this rank's program ended by an error.

        Raises:
            TrainingError: one failed.
        """
        # A program that ended by an error, after its run, has nothing for which other ranks could wait.
        deadline = time.monotonic() + self._patience.grace if failed else math.inf
        while (running := self._monitor.running) and time.monotonic() < deadline:
            select.select([handle for handle, rank in self._handles.items() if rank in running], [], [], 1.0)
            if self._collect() or self._reported:
                break
        self.end()
        for handle in self._handles:
            os.close(handle)
        if self._reported:
            raise TrainingError("")
        if verdict := judge(self._monitor.failures):
            self.show_logs()
            raise TrainingError(verdict.describe())
        if self._temporary:
            shutil.rmtree(self.logs, ignore_errors=True)


def at_exit(workers: Workers) -> None:
    """When the program ends, wait for its workers; one that fails after ``fit`` returned makes the command fail."""

    def wait() -> None:
        try:
            workers.finish(failed=getattr(sys, "last_value", None) is not None)
        except TrainingError as error:
            if str(error):
                print(f"geartrain: {error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            remove_temporary_folder()
            _exit(1)

    atexit.register(wait)
