"""Forks: a forked child, such as a DataLoader worker, must not keep its rank's signal handlers and pipes, and must end with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import process, util
from typing import Any

import torch.distributed as dist

from geartrain.launch.bootstrap import die_with_parent
from geartrain.launch.cluster import STARTED_BY

#: The environment variable that names the starter's folder for the sockets of multiprocessing.
TEMPORARY = "GEARTRAIN_TEMPORARY"
#: Seconds that a fork waits on older Pythons; see ``_settle``.
_SETTLE = 0.005
#: Descriptors that forked children close.
_own_descriptors: set[int] = set()
#: Signal handlers that forked children get back.
_handlers_before: dict[int, Any] = {}
#: True if forks wait until it is safe, and children that the main thread forks die with this process.
_is_guarded = False
#: Of a thread that is forking: ``mask``, the signals that it had blocked before; ``is_main``.
_fork = threading.local()


def guard_forks() -> None:
    """Let every later fork of this process wait until it is safe, and every child of the main thread die with this process.

    torch's loader workers look for their parent, but not while they are blocked in writing a batch.
    """
    global _is_guarded
    _is_guarded = True


def is_forking() -> bool:
    """True if this thread is in the middle of a fork, where Python drops every exception."""
    return hasattr(_fork, "mask")


def _before() -> None:
    if _handlers_before:  # one that came before the child has its handlers back would be lost
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, _handlers_before)
    _fork.is_main = threading.current_thread() is threading.main_thread()
    if _is_guarded:
        _settle()


def _in_parent() -> None:
    if is_forking():
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)
        del _fork.mask


def _in_child() -> None:
    if _is_guarded and _fork.is_main:  # the signal follows the thread that forked
        die_with_parent()
    if _handlers_before:
        # A signal to the child must neither wake the rank's watcher nor raise the rank's Interrupted: Pool.terminate() sends SIGTERM.
        signal.set_wakeup_fd(-1)
        for number, handler in _handlers_before.items():
            signal.signal(number, handler)
        _handlers_before.clear()
    for descriptor in _own_descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _own_descriptors.clear()
    _in_parent()  # the child has the mask of the thread that forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


@contextmanager
def not_inherited(*descriptors: int) -> Iterator[None]:
    """Close these descriptors in every child that is forked inside, and here at the end."""
    mine = os.getpid()
    _own_descriptors.update(descriptors)
    try:
        yield
    finally:
        if os.getpid() == mine:  # a forked child that comes here has closed them
            _own_descriptors.difference_update(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


@contextmanager
def handlers_not_inherited(before: dict[int, Any]) -> Iterator[None]:
    """Give these signal handlers back in every child that is forked inside."""
    outermost = not _handlers_before
    if outermost:
        _handlers_before.update(before)
    try:
        yield
    finally:
        if outermost:
            _handlers_before.clear()


def adopt_temporary_folder() -> None:
    """Let this rank use the folder ``pymp-*`` of its starter, see :func:`share_temporary_folder`."""
    if os.environ.get(STARTED_BY) == str(os.getpid()) and (folder := os.environ.get(TEMPORARY)):
        process.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]


def share_temporary_folder(loaders: Iterable[Any]) -> None:
    """Make one folder ``pymp-*``, for multiprocessing's sockets, if one of the loaders has workers, which then use it too.

    Otherwise each worker makes its own when it first sends a tensor. multiprocessing ends workers by SIGTERM after an error, and torch's
    handler of it removes nothing.
    """
    if any(getattr(loader, "num_workers", 0) for loader in loaders):
        util.get_temp_dir()


def remove_temporary_folder() -> None:
    """Remove the folder ``pymp-*`` of this process, which is about to end without Python's own cleanup."""
    if folder := process.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)


def _settle() -> None:
    """Let threads of the process group come to rest before a fork.

    Python 3.11 re-creates the lock of its list of threads in a forked child only after it has taken it: if another thread was
    adding itself to the list, the child, a loader worker, hangs. gloo's threads do so just after a collective, to free what it
    held; measured with a loader worker an epoch: one hang in 300 epochs. Newer Pythons hold the lock themselves while they fork; since
    which one was not looked up.
    """
    if sys.version_info < (3, 13) and dist.is_initialized():
        time.sleep(_SETTLE)
