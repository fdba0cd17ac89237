"""A thread that communicates, in the order in which it gets work.

DDP's communication hook is not used: on gloo it hangs if it blocks on a collective inside a
future's callback. One thread with a separate process group does not hang with any number of
buckets, and backward continues in the meantime.

On CUDA the thread has its own stream. Before the work, this stream waits for the work that was on
the submitter's stream at the time of ``submit``. ``result`` makes the caller's stream wait for the
thread's stream. The CUDA path has never been run, because no GPU was available.
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
    """Work that was submitted to a :class:`Channel`."""

    def __init__(self, work: Callable[[], Any], device: torch.device) -> None:
        self._work: Callable[[], Any] | None = work
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        #: On CUDA, an event on the submitter's stream.
        self._given: Any = None
        if device.type == "cuda":
            self._given = torch.cuda.current_stream(device).record_event()
        #: On CUDA, an event on the channel's stream after the work.
        self._made: Any = None

    def do(
        self, refused: BaseException | None, stream: torch.cuda.Stream | None
    ) -> BaseException | None:
        """Do the work in the channel's thread, or fail with ``refused``; return the error."""
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
        except BaseException as error:  # result() raises it
            self._error = error
        self._done.set()
        return self._error

    def done(self) -> bool:
        """True if the work has ended, with or without an error."""
        return self._done.is_set()

    def result(self) -> Any:
        """Wait for the work; return its result.

        Raises:
            BaseException: the error of this work, or of earlier work of the same channel.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._made is not None:
            torch.cuda.current_stream().wait_event(self._made)
        return self._result


class Channel:
    """A thread that does work in order.

    After a failure, later work is not done, because other ranks do not take part in it.

    Args:
        device: device of the tensors.
        name: name of the thread.
    """

    def __init__(self, device: torch.device | None = None, name: str = "geartrain-bagua") -> None:
        self._device = torch.device("cpu") if device is None else device
        self._work: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A daemon: if another rank dies, a collective may never return. The process must still end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Job:
        """Do ``work`` after all earlier work. The job returns its result or raises its error."""
        job = Job(work, self._device)
        self._work.put(job)
        return job

    def close(self, seconds: float) -> bool:
        """End the thread after all submitted work.

        Args:
            seconds: how long to wait.

        Returns:
            True if the thread ended in time.
        """
        self._work.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            # At exit the failed run has closed the connections, so the thread can end. The
            # interpreter may crash if it exits while the thread is in a collective.
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
            except BaseException as error:  # every job fails with it
                failed = error
        with on_stream:
            while (job := self._work.get()) is not None:
                failed = job.do(failed, stream)
                del job  # its tensors must not live until the next job
