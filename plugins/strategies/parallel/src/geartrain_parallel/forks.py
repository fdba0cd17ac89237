"""Make forks of a rank safe.

A child of a rank dies with the rank, and closes the rank's pipes. A fork waits until threads of the
process group are idle. A rank and its starter use one folder for the sockets of multiprocessing, so
that a killed rank leaves none.
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

import torch.distributed as dist

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
#: ``is_main``, in a thread that forks.
_fork = threading.local()


def guard_forks() -> None:
    """Make later forks of this process, which has :func:`raise_on_signals`, wait until it is safe.

    Every child of the main thread then dies with this process. torch's loader workers check if
    their parent is alive, but not while they are blocked in writing a batch.
    """
    global _is_guarded
    _is_guarded = True


def before_fork() -> None:
    """Prepare the fork of a rank."""
    if not _is_guarded:
        return
    _fork.is_main = threading.current_thread() is threading.main_thread()
    _settle()


def _in_child() -> None:
    # The kernel sends the signal when the thread that forked ends, so only for the main thread.
    if _is_guarded and getattr(_fork, "is_main", False):
        die_with_parent()
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
    """Wait until threads of the process group are idle before a fork.

    Python 3.11 re-creates the lock of its list of threads in a forked child only after taking it.
    If another thread was adding itself to the list, the child, a loader worker, hangs. gloo's
    threads do this just after a collective, to free its tensors. Measured with one loader worker
    per epoch: one hang in 300 epochs. Python 3.13 holds the lock while it forks; 3.12 was not
    checked.
    """
    if sys.version_info < (3, 13) and dist.is_initialized():
        time.sleep(_SETTLE)
