"""One thread that communicates, in the order in which work is given to it.

A communication hook that blocks on a collective inside a future's callback hangs on gloo; one ordered thread with a process group of its
own does not, however many buckets there are, and backward goes on meanwhile.

On CUDA the thread has a stream of its own. It waits for what the giver's stream had to do when work was given, and whoever asks for the
result lets its own stream wait for what the work has put on the thread's. No GPU was there to run this on.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Job:
    """Work that was given to a :class:`Channel`."""

    def __init__(self, work: Callable[[], Any], device: torch.device) -> None:
        self._work: Callable[[], Any] | None = work
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        #: On CUDA, what was on the giver's stream and, once it is done, what is on the channel's.
        self._given: Any = (
            torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        )
        self._made: Any = None

    def do(
        self, refused: BaseException | None, stream: torch.cuda.Stream | None
    ) -> BaseException | None:
        """In the channel's thread: do it, or fail as an earlier one did. Returns the error."""
        work, self._work = self._work, None
        try:
            if refused is not None:
                raise refused
            assert work is not None
            if stream is None:
                self._result = work()
            else:
                stream.wait_event(self._given)
                self._result = work()
                self._made = stream.record_event()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self._done.set()
        return self._error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def result(self) -> Any:
        """Wait for it; what it returned.

        Raises:
            BaseException: what it raised, or what earlier work of the same channel did.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._made is not None:
            torch.cuda.current_stream().wait_event(self._made)
        return self._result


class Channel:
    """Work for one thread, done in order.

    Once something has failed, nothing that was given later is done: other ranks do not take part in it.

    Args:
        device: where the tensors are.
        name: the thread's.
    """

    def __init__(self, device: torch.device | None = None, name: str = "geartrain-bagua") -> None:
        self._device = torch.device("cpu") if device is None else device
        self._work: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A daemon: where another rank has died, a collective may never return, and must not keep this process from its end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Job:
        """Do ``work`` after everything that was submitted before; its result or error is the job's."""
        job = Job(work, self._device)
        self._work.put(job)
        return job

    def close(self, seconds: float) -> bool:
        """End the thread after what was submitted; whether it ended in time. One that did not is waited for, shortly, when this process
        ends: the run's failure has closed its connections then, and the interpreter should not end under it."""
        self._work.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            atexit.register(self._thread.join, 2.0)
            return False
        return True

    def _run(self) -> None:
        failed: BaseException | None = None
        on_stream: AbstractContextManager[Any] = nullcontext()
        stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            try:
                torch.cuda.set_device(self._device)
                stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                on_stream = torch.cuda.stream(stream)
            except BaseException as error:  # whoever gives work is told: nobody else would do it
                failed = error
        with on_stream:
            while (job := self._work.get()) is not None:
                failed = job.do(failed, stream)
                del job  # what it holds is not to live until the next one comes
