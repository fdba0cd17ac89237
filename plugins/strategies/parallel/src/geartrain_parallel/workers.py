"""Start this node's other ranks and supervise them, while this process works as local rank 0.

Rank 0 may be blocked in a collective. There no Python signal handler runs until the timeout, and
aborting the group does not help. The end of its peers unblocks it within milliseconds. So a thread,
which a worker's exit or a signal wakes up, ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

from geartrain import TrainingError
from geartrain.plugin_api import START_DIRECTORY
from geartrain_parallel import bootstrap, rerun_command
from geartrain_parallel.failures import Failure, is_timeout
from geartrain_parallel.forks import TEMPORARY, not_inherited, remove_temporary_folder
from geartrain_parallel.patience import Patience
from geartrain_parallel.reports import ERROR_FILE, failed_at, is_tearing_down
from geartrain_parallel.signals import SIGNALS, raise_on_signals
from geartrain_parallel.supervisor import Supervisor

_exit = os._exit


@dataclass(frozen=True, slots=True)
class _Worker:
    """One of the other ranks, which runs the same command."""

    number: int
    process: subprocess.Popen[bytes]
    sentinel: int
    error_file: Path

    @classmethod
    def start(cls, command: list[str], environment: Mapping[str, str], logs: Path) -> _Worker:
        number = int(environment["RANK"])
        error_file = logs / f"rank-{number}.error.json"
        error_file.unlink(missing_ok=True)
        process = subprocess.Popen(
            bootstrap.command(logs / f"rank-{number}.log", command),
            cwd=START_DIRECTORY,
            env={
                **os.environ,
                **environment,
                TEMPORARY: util.get_temp_dir(),
                ERROR_FILE: str(error_file),
            },
            start_new_session=True,  # so that only this process gets Ctrl-C
        )
        return cls(number, process, os.pidfd_open(process.pid), error_file)

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the rank and its children, which the rank may be unable to end."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid, number)

    def error(self) -> Failure | None:
        return Failure.read(self.number, self.error_file)


class Workers:
    """This node's other ranks.

    Args:
        environments: one for each rank to start, with its ``RANK``.
        logs: folder for ``rank-N.log``; if ``None``, a temporary one, which is removed after
            success.
    """

    def __init__(self, environments: list[Mapping[str, str]], logs: Path | None) -> None:
        # First, because these may raise an error, and nothing has started yet.
        command, self._patience = rerun_command.command(), Patience.from_environment()
        ranks = [int(environment["RANK"]) for environment in environments]
        self._own_rank = min(ranks) - 1
        #: True if every rank of the program is on this node.
        sizes = {int(environment.get("WORLD_SIZE", 0)) for environment in environments}
        self._are_all = sizes == {len(environments) + 1}
        self._temporary = logs is None
        # Absolute, because ranks start in another folder.
        self.logs = (
            Path(tempfile.mkdtemp(prefix="geartrain-logs-")) if logs is None else logs.absolute()
        )
        self.logs.mkdir(parents=True, exist_ok=True)
        self._workers: list[_Worker] = []
        self.supervisor = Supervisor(self._workers, self.logs, self._patience)
        #: True after a failed run, whose error has named the rank to blame.
        self._reported = False
        #: The exit code of the program after a failed run.
        self.exit_code = 1
        try:
            for environment in environments:
                self._workers.append(_Worker.start(command, environment, self.logs))
        except BaseException:
            self.supervisor.end()
            raise

    # --- supervision ------------------------------------------------------------------------------

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """Work as this rank while the others are watched.

        Raises:
            TrainingError: another rank failed first. The message has that rank, its error and log.
            BaseException: this rank's own error.
        """
        if self._reported or self.supervisor.is_ending:
            if not self._reported:
                self.show_logs()
            self._reported = True
            reason = "".join(f"; {failure.describe()}" for failure in self.supervisor.failures)
            raise TrainingError(
                f"the other ranks of this program were ended after a run that failed{reason}. "
                "Fix: start the program again"
            )
        over = threading.Event()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        handled = _handled_by_program()
        with not_inherited(wake_read, wake_write), self._exits_fail():
            old_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
            watcher = threading.Thread(
                target=self._watch,
                args=(wake_read, over, {*SIGNALS} - handled),
                name="geartrain-watch",
                daemon=True,
            )
            watcher.start()
            try:
                with raise_on_signals():
                    yield
            except BaseException as error:
                self._raise_first_failure(error)
                raise
            finally:
                over.set()
                # Write, because closing wakes no reader while a forked child holds a copy. OSError:
                # the pipe is full and wakes the watcher, or it is closed, in a child of user code.
                with contextlib.suppress(OSError):
                    os.write(wake_write, b"\0")
                watcher.join()
                signal.set_wakeup_fd(old_wake)

    @contextmanager
    def _exits_fail(self) -> Iterator[None]:
        """Make ``os._exit(0)`` fail in this process, which would otherwise look like success."""
        pid = os.getpid()

        def leave(status: int) -> NoReturn:
            if os.getpid() != pid:
                _exit(status)  # a forked child, which multiprocessing ends in this way
            try:
                if status == 0:
                    message = (
                        f"rank {self._own_rank} left the program before the run ended (os._exit(0))"
                    )
                    print(f"geartrain: {message}", file=sys.stderr, flush=True)
                # Not the process groups: multiprocessing's tracker there must still clean up.
                for worker in self._workers:
                    worker.process.kill()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        worker.process.wait(self._patience.grace)
                remove_temporary_folder()
            finally:
                _exit(status or 1)

        before, os._exit = os._exit, leave
        try:
            yield
        finally:
            os._exit = before

    def _watch(self, wake: int, over: threading.Event, signals: Set[int]) -> None:
        """End the others after a failure or a signal, and then this process if it does not end.

        Args:
            signals: those that end the run; the program handles others itself.
        """
        while True:
            failed = self.supervisor.watch(wake)
            if over.is_set():
                return
            if failed:
                self.supervisor.unwind()
                return self._kill_if_stuck(over)
            if not set(os.read(wake, 64)).isdisjoint(signals):
                self.supervisor.end()
                return self._kill_if_stuck(over)

    def _kill_if_stuck(self, over: threading.Event) -> None:
        """End this process if it does not end by itself.

        The other ranks are dead, so any collective on rank 0 has failed. If rank 0 is still alive,
        it hangs in something else, and must end with the cause shown.
        """
        began, grace = time.monotonic(), self._patience.grace
        if over.wait(grace):
            return
        # This interrupts a sleep or a Python loop, but must not interrupt teardown.
        if failed_at() is None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if over.wait(grace):
            return
        if is_tearing_down():
            while is_tearing_down() and time.monotonic() < began + self._patience.teardown:
                if over.wait(0.5):
                    return
            if over.wait(grace):
                return
        cause = (
            "; ".join(failure.describe() for failure in self.supervisor.failures) or "interrupted"
        )
        took = time.monotonic() - began
        self.show_logs()
        _fail(f"{cause}. This rank did not end within {took:.0f} s and is stopped.")

    # --- afterwards -------------------------------------------------------------------------------

    def _raise_first_failure(self, error: BaseException) -> None:
        """After a failure of this rank, raise the error of the rank to blame, if that is another.

        The error of this rank is then only the closed connection.
        """
        failure = Failure.of(self._own_rank, failed_at() or time.time(), error)
        self._reported = True
        # Ranks that waited report a timeout. The late rank reports nothing, or is this one.
        silent = [0] if self._are_all and not is_timeout(str(error)) else []
        if isinstance(error, KeyboardInterrupt):
            self.exit_code = getattr(error, "code", 1)
            self.supervisor.end()
            verdict = self.supervisor.judge(silent=silent)
        else:
            # A failed worker closes its connections before it exits. Others need a moment to tear
            # down after our failure.
            self.supervisor.unwind()
            verdict = self.supervisor.judge([failure], silent, self.supervisor.succeeded)
        if verdict is not None and verdict.failure is not failure:
            # Keep this rank's error only if it is a timeout, not the closed connection.
            cause = error if verdict.failure is None else None
            raise TrainingError(
                verdict.message + self.supervisor.show_log(verdict.ranks[0])
            ) from cause

    def show_logs(self) -> None:
        """Print the end of the output of ranks that failed."""
        for failure in self.supervisor.failures:
            self.supervisor.show_log(failure.rank)

    def finish(self, failed: bool) -> None:
        """Wait for the workers at the end of the program: their scripts continue after ``fit``.

        Args:
            failed: True if this rank's program ended with an error.

        Raises:
            TrainingError: a worker failed.
        """
        # After an error of this program, the other ranks have nothing to wait for.
        deadline = time.monotonic() + self._patience.grace if failed else math.inf
        while (
            not (self.supervisor.failures or self._reported)
            and self.supervisor.running
            and time.monotonic() < deadline
        ):
            self.supervisor.wait(1.0)
            self.supervisor.look()
        self.supervisor.end()
        for worker in self._workers:
            os.close(worker.sentinel)
        if self._reported:
            raise TrainingError("")
        if verdict := self.supervisor.judge():
            self.show_logs()
            raise TrainingError(verdict.message)
        if self._temporary:
            shutil.rmtree(self.logs, ignore_errors=True)


def at_exit(workers: Workers) -> None:
    """Wait for workers when the program ends; fail the command if one fails after ``fit``."""

    def wait() -> None:
        try:
            workers.finish(failed=getattr(sys, "last_value", None) is not None)
        except TrainingError as error:
            sys.stdout.flush()
            _fail(str(error), workers.exit_code)

    atexit.register(wait)


def _fail(message: str, code: int = 1) -> None:
    """End this process, without Python's own cleanup."""
    if message:
        print(f"geartrain: {message}", file=sys.stderr)
    sys.stderr.flush()
    remove_temporary_folder()
    _exit(code)


def _handled_by_program() -> set[int]:
    """Return the signals for which the program, or a plugin, has handlers of its own."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return {
        number
        for number, handler in handlers.items()
        if callable(handler)
        and handler is not signal.default_int_handler
        and not getattr(handler, "__module__", "").startswith("geartrain.")
    }
