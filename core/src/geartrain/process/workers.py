"""Start this node's other ranks and watch them, while this process works as local rank 0.

Built on torch.distributed.elastic.multiprocessing, which starts, polls and ends the processes. What is added here is what it leaves
to its caller: rank 0 may be blocked in a collective, where no Python signal handler runs until the timeout, and where aborting the
group does not help; but ending its peers unblocks it within milliseconds. So a thread, woken by a worker's exit or by a signal,
ends the others, allows seconds to unwind, and keeps whose error came first.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from geartrain.errors import TrainingError
from geartrain.process import ERROR_FILE, bootstrap, failed_at, has_failed, is_connection, is_telling, is_timeout, relaunch, stopped
from geartrain.process.forks import TEMPORARY, not_inherited, remove_temporary_folder
from geartrain.process.signals import SIGNALS, hear_signals

# elastic warns of every process that it is asked to end.
logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)

#: Seconds between asking a process to end and killing it.
GRACE = 5.0
#: Seconds that plugins and modules may take where rank 0 has failed and tells them: loggers hand over what they have.
TEARDOWN = 300.0
_exit = os._exit


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    #: When, in seconds since the epoch.
    when: float
    #: The signal that ended it, if one did.
    signal: int | None
    message: str

    def describe(self) -> str:
        if self.signal is not None:
            return f"rank {self.rank} was ended by {signal.Signals(self.signal).name}"
        return f"rank {self.rank} failed: {self.message}"


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
        return LogsDest(dict(console), dict(console), {}, {}, errors, "", "")

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
        command = relaunch.command()  # first: it may refuse, and then nothing is left
        self.ranks = [int(environment["RANK"]) for environment in environments]
        #: Whether every rank of the program is on this node.
        self._are_all = {int(environment.get("WORLD_SIZE", 0)) for environment in environments} == {len(environments) + 1}
        self._temporary = logs is None
        self.logs = Path(tempfile.mkdtemp(prefix="geartrain-logs-")) if logs is None else logs.absolute()  # ranks start in another folder
        self.logs.mkdir(parents=True, exist_ok=True)
        log_paths = [str(self.logs / f"rank-{rank}.log") for rank in self.ranks]
        before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGQUIT)}
        here = os.getcwd()
        os.chdir(relaunch.directory())
        try:
            self._context: PContext = start_processes(
                "geartrain",
                sys.executable,
                {i: ("-I", "-S", bootstrap.__file__, str(os.getpid()), path, *command) for i, path in enumerate(log_paths)},
                {i: {**environment, TEMPORARY: util.get_temp_dir()} for i, environment in enumerate(environments)},
                _Logs(self.logs, self.ranks),
            )
        finally:
            os.chdir(here)
            # elastic's start() replaces these for good.
            for number, handler in before.items():
                signal.signal(number, handler)
        self._handles = {os.pidfd_open(pid): i for i, pid in self._context.pids().items()}
        self._done: dict[int, int] = {}
        self._stopped = stopped.Stopped()
        self._lock = threading.Lock()
        self._ending = self._reported = False
        #: Ranks that had told no error when the first was told to end.
        self._silent: list[int] = []
        #: The first failures, before anyone was told to end.
        self.failures: list[Failure] = []

    # --- supervision -----------------------------------------------------------------------------------------------------

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """This rank does its own work while the others are watched.

        Raises:
            TrainingError: another rank failed first; it names the rank and shows its error and log.
            BaseException: this rank's own error.
        """
        if self._reported or self._ending:
            if not self._reported:
                self.show_logs()
            self._reported = True
            why = "".join(f"; {failure.describe()}" for failure in self.failures)
            raise TrainingError(f"the other ranks of this program were ended after a run that failed{why}. Fix: start the program again")
        over = threading.Event()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        with not_inherited(wake_read, wake_write), self._exits_fail():
            old_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
            watcher = threading.Thread(target=self._watch, args=(wake_read, over), name="geartrain-watch", daemon=True)
            watcher.start()
            try:
                with hear_signals():
                    yield
            except BaseException as error:
                self._explain(error, failed_at())
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
                    select.select([handle], [], [], GRACE)
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
            ready = [handle for handle, _ in poll.poll(stopped.PERIOD * 1000)]
            if over.is_set():
                return
            for handle in ready:
                if handle in self._handles:
                    poll.unregister(handle)
            failed = bool(self._collect())
            signalled = wake in ready and not set(os.read(wake, 64)).isdisjoint(SIGNALS)
            if failed or signalled:
                if failed and any(is_timeout(failure.message) for failure in self.failures):
                    self._wait_for_others(3.0)
                self.end()
                self._force_out(over)
                return

    def _collect(self) -> list[Failure]:
        """Look who has exited or is stopped; keep and return new failures, unless they were told to end."""
        with self._lock:
            found = self._find_stopped() if not self._ending else []
            for i, handler in self._context.subprocess_handlers.items():  # type: ignore[attr-defined]
                code = handler.proc.poll()
                if code is None or i in self._done:
                    continue
                self._done[i] = code
                if code != 0 and not self._ending:
                    found.append(self._failure(i, code))
            self.failures += found
            return found

    def _find_stopped(self) -> list[Failure]:
        known = {failure.rank for failure in self.failures}
        pids = {pid: self.ranks[i] for i, pid in self._context.pids().items() if i not in self._done and self.ranks[i] not in known}
        return [Failure(pids[pid], time.time() - stopped.PATIENCE, None, stopped.describe()) for pid in self._stopped.too_long(pids)]

    def _failure(self, i: int, code: int) -> Failure:
        try:
            told = json.loads(Path(self._context.error_files[i]).read_text())["message"]
            when, message = float(told["extraInfo"].get("when", told["extraInfo"]["timestamp"])), str(told["message"])
        except (OSError, ValueError, KeyError, TypeError):
            when, message = time.time(), f"exit code {code}"
        else:
            code = 1  # what it told is why, whatever became of it while it tore down
        return Failure(self.ranks[i], when, -code if code < 0 else None, message)

    def _force_out(self, over: threading.Event) -> None:
        """End this process if it does not end by itself: its peers are dead, so any collective on rank 0 has failed. If rank 0 still
        works, it hangs in something else, and the process must end with the cause shown."""
        began = time.monotonic()
        if over.wait(GRACE):
            return
        if not has_failed():  # a sleep or a Python loop hears this; a rank that tears down must not
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if over.wait(GRACE):
            return
        if is_telling():
            while is_telling() and time.monotonic() < began + TEARDOWN:
                if over.wait(0.5):
                    return
            if over.wait(GRACE):
                return
        cause = "; ".join(failure.describe() for failure in self.failures) or "interrupted"
        took = time.monotonic() - began
        print(f"geartrain: {cause}. This rank did not come to an end within {took:.0f} s and is stopped.", file=sys.stderr)
        self.show_logs()
        sys.stderr.flush()
        remove_temporary_folder()
        _exit(1)

    def end(self) -> None:
        """End every worker: SIGTERM, seconds to unwind, SIGKILL; loader workers of theirs with them."""
        with self._lock:
            if not self._ending:  # one that has told its error and is slow to end, on a busy machine, has failed all the same
                self.failures += [self._failure(i, 1) for i, rank in enumerate(self.ranks) if i not in self._done and self._told(rank)]
                self._silent = [rank for rank in self._alive() if not self._told(rank)]
            self._ending = True
            for i, pid in self._context.pids().items():
                if i not in self._done and stopped.is_stopped(pid):
                    os.kill(pid, signal.SIGKILL)  # it hears nothing else; and those that wait for it hear nothing before it has gone
        self._context.close(signal.SIGTERM, timeout=int(GRACE))

    # --- afterwards ------------------------------------------------------------------------------------------------------

    def _explain(self, error: BaseException, failed_at: float) -> None:
        """This rank failed. If another did first, raise that instead: ours is only the connection it closed."""
        if not isinstance(error, KeyboardInterrupt):
            # A worker that failed has closed its connections before it has exited; one that we failed needs a moment to tear down.
            # One that has written its error is on its way out, however slowly a busy machine lets it go.
            self._wait_for_others(3.0)
        self.end()
        self._reported = True
        first = self._first(error, failed_at)
        # Those that waited say so, each in its own words; the one that they waited for says nothing, or is this one.
        late = self._silent
        if first is not None and not late and self._are_all and not is_timeout(str(error)):
            late = [0]
        if late and is_timeout(str(error) if first is None else first.message):
            told = str(error) if first is None else first.describe().partition("\n")[0]
            raise TrainingError(
                f"{_ranks(late)} did not come to a collective within the strategy's timeout (hung or stopped): {told}"
            ) from error
        if first is not None:
            self.show_logs([first.rank])
            raise TrainingError(f"{first.describe()}\n(its output: {self.logs / f'rank-{first.rank}.log'})") from None
        left = [rank for i, rank in enumerate(self.ranks) if self._done.get(i) == 0]
        if left and is_connection(str(error)):
            self.show_logs(left)
            raise TrainingError(f"{_ranks(left)} left the program before the run ended (exit code 0, as after os._exit(0))") from None

    def _wait_for_others(self, seconds: float) -> None:
        """Until all have ended, or so long; longer for one that has told its error."""
        deadline = time.monotonic() + seconds
        while self._alive() and (
            time.monotonic() < deadline or (time.monotonic() < deadline + 2 * GRACE and any(map(self._told, self._alive())))
        ):
            self._collect()
            select.select([], [], [], 0.02)

    def _first(self, error: BaseException, failed_at: float) -> Failure | None:
        """Whose failure came first: a signal's victim says nothing and comes late, so it goes before connection errors."""
        if not self.failures:
            return None
        signalled = [failure for failure in self.failures if failure.signal is not None]
        first = min(signalled or self.failures, key=lambda failure: failure.when)
        mine, theirs = is_connection(str(error)), is_connection(first.message.partition("\n")[0])
        if isinstance(error, KeyboardInterrupt) or (signalled and (mine or failed_at > first.when)):
            return first
        own = failed_at < first.when if mine == theirs else theirs
        return None if own else first

    def _alive(self) -> list[int]:
        """Ranks that have not exited."""
        return [rank for i, rank in enumerate(self.ranks) if i not in self._done]

    def _told(self, rank: int) -> bool:
        """Whether a rank has written an error."""
        return (self.logs / f"rank-{rank}.error.json").exists()

    def show_logs(self, ranks: list[int] | None = None, lines: int = 40) -> None:
        """Print the end of ranks' output."""
        for rank in ranks or [failure.rank for failure in self.failures]:
            path = self.logs / f"rank-{rank}.log"
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
        deadline = time.monotonic() + GRACE if failed else math.inf
        while self._alive() and time.monotonic() < deadline:
            select.select([handle for handle, i in self._handles.items() if i not in self._done], [], [], 1.0)
            if self._collect() or self._reported:
                break
        self.end()
        for handle in self._handles:
            os.close(handle)
        if self._reported:
            raise TrainingError("")
        if self.failures:
            self.show_logs()
            raise TrainingError(min(self.failures, key=lambda failure: failure.when).describe())
        if self._temporary:
            shutil.rmtree(self.logs, ignore_errors=True)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


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
