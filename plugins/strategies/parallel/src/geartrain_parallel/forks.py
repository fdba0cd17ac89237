"""Make forks of a rank safe.

A child of a rank dies with the rank, and closes the rank's pipes. A fork waits until threads of the
strategy's library are idle. A rank and its starter use one folder for the sockets of
multiprocessing, so that a killed rank leaves none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process

from geartrain.plugin_api import ClusterEnvironment
from geartrain_parallel.bootstrap import die_with_parent

#: The environment variable that names the starter's folder for the sockets of multiprocessing.
TEMPORARY = "GEARTRAIN_TEMPORARY"
#: Seconds that a fork waits on older Pythons; see ``_settle``.
_SETTLE = 0.005
#: Descriptors that forked children close.
_own_descriptors: set[int] = set()
#: True if forks wait until it is safe, and children that the main thread forks die with this
#: process.
_is_guarded = False
#: In a thread that forks: ``children_die``, see :func:`let_children_die`; ``is_guarded`` and
#: ``parent``, this process, for the fork that is under way.
_fork = threading.local()


def guard_forks() -> None:
    """Make later forks of this process, which has :func:`raise_on_signals`, wait until it is safe.

    Every child of the main thread then dies with this process. torch's loader workers check if
    their parent is alive, but not while they are blocked in writing a batch.
    """
    global _is_guarded
    _is_guarded = True


def let_children_die() -> None:
    """Let the children of this thread die with it, as those of the main thread do.

    Call it in a thread that stays as long as its children are needed.
    """
    _fork.children_die = True


def before_fork() -> None:
    """Prepare the fork of a rank."""
    if not _is_guarded:
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    _fork.is_guarded = in_main_thread or getattr(_fork, "children_die", False)
    _fork.parent = os.getpid()
    _settle()


def _in_child() -> None:
    # The kernel sends the signal when the thread that forked ends.
    if _is_guarded and getattr(_fork, "is_guarded", False):
        die_with_parent()
        if _fork.parent not in (None, os.getppid()):  # it was killed before this
            os._exit(1)
        _fork.parent = None  # of its own children before_fork may not be called
    for descriptor in _own_descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _own_descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextmanager
def not_inherited(*descriptors: int) -> Iterator[None]:
    """Close these descriptors in every child that is forked inside, and here at the end."""
    pid = os.getpid()
    _own_descriptors.update(descriptors)
    try:
        yield
    finally:
        if os.getpid() == pid:  # a forked child has closed them already
            _own_descriptors.difference_update(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def adopt_temporary_folder() -> None:
    """Use the starter's folder ``pymp-*`` in this rank; see ``Stage.of``."""
    if os.environ.get(ClusterEnvironment.started_by) == str(os.getpid()) and (
        folder := os.environ.get(TEMPORARY)
    ):
        process.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]


def remove_temporary_folder() -> None:
    """Remove this process's folder ``pymp-*`` before it ends without Python's cleanup."""
    if folder := process.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)


def _settle() -> None:
    """Wait until threads of the strategy's library are idle before a fork.

    Python 3.11 re-creates the lock of its list of threads in a forked child only after taking it
    (python/cpython#112275). If another thread was adding itself to the list, the child, a loader
    worker, hangs. Threads of gloo and of Horovod do this just after a collective, to free its
    tensors. Measured: over gloo one hang in 300 epochs with a loader worker; with Horovod 6 in 1600
    forks that each follow a collective, and with the wait none in 4000. Python 3.13 holds the lock
    while it forks; 3.12 was not checked.
    """
    if sys.version_info < (3, 13):
        time.sleep(_SETTLE)
