"""A watchdog that ends a run whose ranks wait without end, and names the missing rank.

Under Gloo, Horovod's stall inspector does nothing: if a rank skips a collective, is stopped or
loses its network, the others wait in C++ without end. Here one thread per run checks every few
seconds how long the current wait has lasted. It also reports this rank's state to the other ranks,
through Horovod's rendezvous server, which stores any key. The training step makes no request.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from geartrain import TrainingError
from geartrain.parallel import Patience

#: The shortest and the longest time in seconds between two checks of the thread.
_LOOKS = (0.2, 5.0)
#: The number of printed frames of a stack.
_FRAMES = 16


class Wait:
    """A wait for other ranks, for the time of a ``with`` block. A polling loop calls ``check``."""

    __slots__ = ("_before", "_dog", "began", "name", "what")

    def __init__(self, dog: Watchdog, what: str, name: str) -> None:
        self._dog, self.what, self.name = dog, what, name

    def __enter__(self) -> Wait:
        dog = self._dog
        self._before, self.began = dog.current, time.monotonic()
        dog.current = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        dog = self._dog
        dog.current = self._before
        dog.last = self

    def check(self) -> None:
        """Raise if the wait has lasted too long.

        Raises:
            TrainingError: names the missing rank.
        """
        if self._dog.verdict is not None:
            raise TrainingError(self._dog.verdict)

    def __str__(self) -> str:
        return f"{self.what} {self.name!r}" if self.name else self.what


class Watchdog:
    """Watches the waits of one thread in one run.

    Args:
        timeout: seconds that one wait may take; 0 watches nothing.
        rank: this process's rank.
        size: the number of ranks.
        board: the notes through which ranks report their state; ``None`` if there is no server.

    Raises:
        UsageError: ``GEARTRAIN_PATIENCE`` cannot be read.
    """

    def __init__(
        self, timeout: float, rank: int, size: int = 1, board: Board | None = None
    ) -> None:
        self.timeout, self.rank, self.size, self._board = timeout, rank, size, board
        self._patience = Patience.from_environment()
        #: The current wait, and the last wait that ended.
        self.current: Wait | None = None
        self.last: Wait | None = None
        #: The reason if the watchdog ends the run.
        self.verdict: str | None = None
        self._watched = threading.get_ident()
        self._interval = min(_LOOKS[1], max(_LOOKS[0], timeout / 10))
        #: Seconds without a report after which a rank counts as silent.
        self._silence = 1 + 2.5 * self._interval
        self._beats = 0
        #: The last report of each other rank, and when it arrived.
        self._heard: dict[int, tuple[dict[str, Any], float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="geartrain-horovod-watchdog", daemon=True
        )
        if timeout:
            self._thread.start()

    def watching(self, what: str, name: str) -> Wait:
        """Watch the wait in a ``with`` block. This costs two reads of a clock.

        Args:
            what: the operation in words.
            name: its name in Horovod.
        """
        return Wait(self, what, name)

    def leave(self, shutdown: Callable[[], Any], failed: bool) -> None:
        """Leave Horovod and stop the watchdog.

        Ranks leave together, so a rank that hangs blocks the others. After an error this rank does
        not wait for them, and ends its process if Horovod still hangs.

        Raises:
            TrainingError: the others did not leave within the timeout.
        """
        thread = threading.Thread(target=shutdown, name="horovod-shutdown", daemon=True)
        with self.watching("shutdown", "") as wait:
            thread.start()
            while thread.is_alive() and not (
                (failed or self.verdict) and time.monotonic() > wait.began + self._patience.unwind
            ):
                if not failed:
                    wait.check()
                thread.join(0.05)
        self._stop.set()
        if thread.is_alive():  # Horovod would also wait in its shutdown at the program's end
            self._end_soon(thread)
        elif self.timeout:
            self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._tell()
        began = time.monotonic()
        while not self._stop.wait(self._interval):
            current = time.monotonic()
            wait, slept = self.current, current - began - self._interval
            if wait is not None and slept > 1 + 2 * self._interval:
                # This process was stopped, and maybe all others too: do not count that time.
                wait.began += slept
            self._tell()
            waited = 0.0 if wait is None else current - wait.began
            if wait is not None and waited > self.timeout / 2:
                self._listen()
            if wait is not None and waited > self.timeout:
                self._make_sure()
                if wait is self.current:
                    self._judge(wait, waited)
                    return
            began = time.monotonic()

    def _tell(self) -> None:
        """Report this rank's state to the other ranks."""
        if self._board is None:
            return
        self._beats += 1
        wait, last = self.current, self.last
        report = {
            "beat": self._beats,
            "in": None if wait is None else str(wait),
            "last": None if last is None else str(last),
        }
        self._board.put(str(self.rank), json.dumps({**report, "stack": self._stack()}))

    def _listen(self) -> None:
        """Read the reports of the other ranks."""
        for rank in range(self.size) if self._board is not None else ():
            assert self._board is not None
            try:
                report = json.loads(self._board.get(str(rank)) or "{}")
            except OSError:
                return  # the server hangs or has gone; the verdict says that
            if rank not in self._heard or self._heard[rank][0].get("beat") != report.get("beat"):
                self._heard[rank] = (report, time.monotonic())

    def _make_sure(self) -> None:
        """Listen until each rank has sent a new report or counts as silent."""
        before = {rank: report.get("beat") for rank, (report, _) in self._heard.items()}
        deadline = time.monotonic() + 2 * self._silence
        while time.monotonic() < deadline and any(
            self._heard[rank][0].get("beat") == beat
            and time.monotonic() - self._heard[rank][1] <= self._silence
            for rank, beat in before.items()
            if rank != self.rank
        ):
            self._stop.wait(self._interval / 2)
            self._tell()
            self._listen()

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._watched)
        return [] if frame is None else traceback.format_stack(frame)[-_FRAMES:]

    # --- the end of a run ------------------------------------------------------------------------

    def _judge(self, wait: Wait, waited: float) -> None:
        late, known = {}, ""
        if self._board is not None and self._board.problem:
            known = f"it has no reports of the others: {self._board.problem}"
        elif self._board is not None:
            late = {
                rank: reason
                for rank in range(self.size)
                if rank != self.rank and (reason := self._late(rank, wait)) is not None
            }
        else:
            known = "the missing rank is unknown, because ranks cannot report under this launcher"
        if self.size > 1 and not late and not known:
            known = "every rank waits in it: the network between them, or a rank's device, hangs"
        verdict = (
            f"rank {self.rank} has waited {waited:.0f} s for the others in {wait} "
            f"(stall_timeout={self.timeout:g})"
        )
        verdict += "".join(f"; rank {rank} {reason}" for rank, reason in late.items())
        verdict += f"; {known}" if known else ""
        stacks = {
            self.rank: self._stack(),
            **{rank: self._heard[rank][0].get("stack", []) for rank in late if rank in self._heard},
        }
        lines = [f"geartrain: {verdict}"]
        for rank, stack in stacks.items():
            lines += [f"--- rank {rank} is at ---", "".join(stack).rstrip()] if stack else []
        _print("\n".join(lines))
        self.verdict = verdict
        deadline = time.monotonic() + self._patience.unwind
        while self.current is wait and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.current is wait:
            _print(f"geartrain: rank {self.rank} still hangs in {wait}: its process is ended")
            os._exit(1)

    def _late(self, rank: int, wait: Wait) -> str | None:
        """Return why a rank is missing; ``None`` if it waits too, or if nothing is known."""
        if rank not in self._heard:
            return None
        report, when = self._heard[rank]
        if not report:
            return "has not joined it, and has never sent a report"
        doing = f"in {report['in']}" if report.get("in") else "in no operation of Horovod"
        if not report.get("in") and report.get("last"):
            doing += f"; its last was {report['last']}"
        silent = time.monotonic() - when
        if silent > self._silence:
            reason = "it is stopped, or its machine or network has gone"
            return (
                f"has not joined it and has sent no report for {silent:.0f} s ({reason}); "
                f"it was {doing}"
            )
        return None if report.get("in") == str(wait) else f"has not joined it: it is {doing}"

    def _end_soon(self, leaving: threading.Thread) -> None:
        """End the process by force if Horovod still hangs after the error was reported."""

        def end() -> None:
            leaving.join(2 * self._patience.grace)
            if leaving.is_alive():
                _print(
                    f"geartrain: rank {self.rank} cannot leave Horovod, because other ranks hang: "
                    "its process is ended"
                )
                os._exit(1)

        threading.Thread(target=end, name="geartrain-horovod-end", daemon=True).start()


class Board:
    """Notes on Horovod's rendezvous server. Each name keeps its last note.

    Args:
        address: the server's IP address or host name.
        port: the server's port.
        topic: a prefix that separates the notes of different runs.
    """

    #: Seconds that a request may take.
    _PATIENCE = 2.0

    def __init__(self, address: str, port: int, topic: str) -> None:
        self._address, self._port, self._topic = address, port, topic
        #: The error of the last request, if it failed.
        self.problem: str | None = None

    def put(self, name: str, text: str) -> None:
        """Store a note. If it fails, the others get no report of this rank and print that."""
        with contextlib.suppress(OSError):
            self._call("PUT", name, text)

    def get(self, name: str) -> str | None:
        """Return a note, or ``None``.

        Raises:
            OSError: the server cannot be reached, or does not answer.
        """
        return self._call("GET", name, None)

    def _call(self, method: str, name: str, text: str | None) -> str | None:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=self._PATIENCE)
        try:
            connection.request(
                method, f"/{self._topic}/{name}", None if text is None else text.encode()
            )
            response = connection.getresponse()
            body = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            self.problem = (
                f"{self._address}:{self._port} does not answer ({type(error).__name__}: {error})"
            )
            raise OSError(self.problem) from error
        finally:
            connection.close()
        self.problem = None
        return body if response.status == 200 else None


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
