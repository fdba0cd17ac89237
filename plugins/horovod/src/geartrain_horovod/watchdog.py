"""Ends a run whose ranks wait for each other for ever, and says who did not come.

Under Gloo, Horovod's own stall inspector does nothing: where a rank skips a collective, is stopped or loses its network, the others wait
in C++ without end. Here one thread a run looks every few seconds how long the wait that is under way has lasted, and tells the other
ranks what this one does, through Horovod's rendezvous server, which keeps any key. What ranks wait for is never asked in a step.
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

#: Seconds between two looks of the thread, at the least and at most.
_LOOKS = (0.2, 5.0)
#: Frames of a stack that are shown.
_FRAMES = 16


class Wait:
    """One wait, under way in this block; ``check`` is for a loop that looks again and again whether it is over."""

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
        """Raises:
        TrainingError: the wait has lasted too long; it says who did not come.
        """
        if self._dog.verdict is not None:
            raise TrainingError(self._dog.verdict)

    def __str__(self) -> str:
        return f"{self.what} {self.name!r}" if self.name else self.what


class Watchdog:
    """Watches the waits of one thread in one run.

    Args:
        timeout: seconds that one may take; 0 watches nothing.
        rank: this process's.
        size: the number of ranks.
        board: where ranks tell each other what they do; ``None`` where they cannot.

    Raises:
        UsageError: ``GEARTRAIN_PATIENCE`` cannot be read.
    """

    def __init__(
        self, timeout: float, rank: int, size: int = 1, board: Board | None = None
    ) -> None:
        self.timeout, self.rank, self.size, self._board = timeout, rank, size, board
        self._patience = Patience.from_environment()
        #: The wait that is under way, and the one that ended last.
        self.current: Wait | None = None
        self.last: Wait | None = None
        #: Why the run ends, once it does.
        self.verdict: str | None = None
        self._watched = threading.get_ident()
        self._interval = min(_LOOKS[1], max(_LOOKS[0], timeout / 10))
        #: Seconds without a word after which a rank is called silent.
        self._silence = 1 + 2.5 * self._interval
        self._beats = 0
        #: Of other ranks: what they told last, and when that was new.
        self._heard: dict[int, tuple[dict[str, Any], float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="geartrain-horovod-watchdog", daemon=True
        )
        if timeout:
            self._thread.start()

    def watching(self, what: str, name: str) -> Wait:
        """Watch the wait in a ``with`` block; it costs two reads of a clock.

        Args:
            what: the operation.
            name: under which Horovod knows it.
        """
        return Wait(self, what, name)

    def leave(self, shutdown: Callable[[], Any], failed: bool) -> None:
        """Leave Horovod, and watch nothing more. Ranks agree to leave, so that one that hangs keeps the others: after an error they are
        not waited for, and the process is ended where it does not end by itself.

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
        if (
            thread.is_alive()
        ):  # Horovod shuts down at the end of the program, too, and would wait there
            self._end_soon(thread)
        elif self.timeout:
            self._thread.join()

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._tell()
        began = time.monotonic()
        while not self._stop.wait(self._interval):
            now = time.monotonic()
            wait, slept = self.current, now - began - self._interval
            if wait is not None and slept > 1 + 2 * self._interval:
                wait.began += slept  # this process itself was stopped, and so perhaps was everything: nobody is late for that
            self._tell()
            waited = 0.0 if wait is None else now - wait.began
            if wait is not None and waited > self.timeout / 2:
                self._listen()
            if wait is not None and waited > self.timeout:
                self._make_sure()
                if wait is self.current:
                    self._judge(wait, waited)
                    return
            began = time.monotonic()

    def _tell(self) -> None:
        """Tell the others what this rank does."""
        if self._board is None:
            return
        self._beats += 1
        wait, last = self.current, self.last
        told = {
            "beat": self._beats,
            "in": None if wait is None else str(wait),
            "last": None if last is None else str(last),
        }
        self._board.put(str(self.rank), json.dumps({**told, "stack": self._stack()}))

    def _listen(self) -> None:
        """Hear what the others do."""
        for rank in range(self.size) if self._board is not None else ():
            assert self._board is not None
            try:
                told = json.loads(self._board.get(str(rank)) or "{}")
            except OSError:
                return  # whoever serves it hangs or has gone; so says the report
            if rank not in self._heard or self._heard[rank][0].get("beat") != told.get("beat"):
                self._heard[rank] = (told, time.monotonic())

    def _make_sure(self) -> None:
        """Listen until every rank has said something new, or nothing for so long that it is called silent."""
        before = {rank: told.get("beat") for rank, (told, _) in self._heard.items()}
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

    # --- the end of a run ------------------------------------------------------------------------------------------------

    def _judge(self, wait: Wait, waited: float) -> None:
        late, known = {}, ""
        if self._board is not None and self._board.problem:
            known = f"it hears nothing of the others: {self._board.problem}"
        elif self._board is not None:
            late = {
                rank: told
                for rank in range(self.size)
                if rank != self.rank and (told := self._late(rank, wait)) is not None
            }
        else:
            known = "which rank did not come cannot be told under this launcher"
        if self.size > 1 and not late and not known:
            known = "every rank waits in it: the network between them, or a rank's device, hangs"
        verdict = f"rank {self.rank} has waited {waited:.0f} s for the others in {wait} (stall_timeout={self.timeout:g})"
        verdict += "".join(f"; rank {rank} {told}" for rank, told in late.items()) + (
            f"; {known}" if known else ""
        )
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
            _print(f"geartrain: rank {self.rank} does not come out of {wait}: its process is ended")
            os._exit(1)

    def _late(self, rank: int, wait: Wait) -> str | None:
        """Why a rank did not come; ``None`` where it waits as this one does, or nothing is known."""
        if rank not in self._heard:
            return None
        told, when = self._heard[rank]
        if not told:
            return "has not joined it, and has never said anything"
        doing = f"in {told['in']}" if told.get("in") else "in no operation of Horovod"
        if not told.get("in") and told.get("last"):
            doing += f"; its last was {told['last']}"
        silent = time.monotonic() - when
        if silent > self._silence:
            why = "it is stopped, or its machine or network has gone"
            return (
                f"has not joined it and has said nothing for {silent:.0f} s ({why}); it was {doing}"
            )
        return None if told.get("in") == str(wait) else f"has not joined it: it is {doing}"

    def _end_soon(self, leaving: threading.Thread) -> None:
        """End the process by force where Horovod still hangs after time to report the error and to end others."""

        def end() -> None:
            leaving.join(2 * self._patience.grace)
            if leaving.is_alive():
                _print(
                    f"geartrain: rank {self.rank} cannot leave Horovod, whose other ranks hang: its process is ended"
                )
                os._exit(1)

        threading.Thread(target=end, name="geartrain-horovod-end", daemon=True).start()


class Board:
    """Horovod's rendezvous server as a place for notes: by name, the last one put.

    Args:
        address: the server's, a number or name.
        port: the server's.
        topic: what keeps the notes of one run apart from others'.
    """

    #: Seconds that the server may take.
    _PATIENCE = 2.0

    def __init__(self, address: str, port: int, topic: str) -> None:
        self._address, self._port, self._topic = address, port, topic
        #: Why the last call failed.
        self.problem: str | None = None

    def put(self, name: str, text: str) -> None:
        """Put a note; where that fails, the others hear nothing of this rank, which is what they report."""
        with contextlib.suppress(OSError):
            self._call("PUT", name, text)

    def get(self, name: str) -> str | None:
        """A note.

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
