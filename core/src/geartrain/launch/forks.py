"""Forks: a child, as a DataLoader worker, must not keep its parent's signal handlers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Signal handlers that forked children restore.
_handlers_before: dict[int, Any] = {}
#: See :func:`call_before_forks`.
_preparations: list[Callable[[], None]] = []
#: In a thread that forks: ``mask``, the signals that it had blocked before.
_fork = threading.local()


def call_before_forks(prepare: Callable[[], None]) -> None:
    """Call a function before each later fork of this process, in the thread that forks."""
    if prepare not in _preparations:
        _preparations.append(prepare)


def is_forking() -> bool:
    """True if this thread is in the middle of a fork, in which Python drops every exception."""
    return hasattr(_fork, "mask")


def _before() -> None:
    if _handlers_before:  # a signal before the child has restored its handlers would be lost
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, _handlers_before)
    for prepare in _preparations:
        prepare()


def _in_parent() -> None:
    if is_forking():
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)
        del _fork.mask


def _in_child() -> None:
    if _handlers_before:
        # A signal to the child, as SIGTERM of Pool.terminate(), must neither wake its parent's
        # watcher nor raise its parent's Interrupted.
        signal.set_wakeup_fd(-1)
        for number, handler in _handlers_before.items():
            signal.signal(number, handler)
        _handlers_before.clear()
    _in_parent()  # the child has the mask of the thread that forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


@contextmanager
def handlers_not_inherited(before: dict[int, Any]) -> Iterator[None]:
    """Restore these signal handlers in every child that is forked inside."""
    outermost = not _handlers_before
    if outermost:
        _handlers_before.update(before)
    try:
        yield
    finally:
        if outermost:
            _handlers_before.clear()
