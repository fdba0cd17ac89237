"""One thread that communicates, in the order in which work is given to it.

A communication hook that blocks on a collective inside a future's callback hangs on gloo; one ordered thread with a process group of its
own does not, however many buckets there are, and backward goes on meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Channel:
    """Work for one thread, done in order.

    Once something has failed, nothing that was given later is done: other ranks do not take part in it.
    """

    def __init__(self, name: str = "geartrain-bagua") -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        # A daemon: where another rank has died, a collective may never return, and must not keep this process from its end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Do ``work`` after everything that was submitted before; its result or error is the future's."""
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def close(self, seconds: float) -> bool:
        """End the thread after what was submitted; whether it ended in time."""
        self._work.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                if self._failed is not None:
                    raise self._failed
                future.set_result(work())
            except BaseException as error:  # handed to whoever waits
                self._failed = error
                future.set_exception(error)
            del item, work, future  # what they hold is not to live until the next work comes
