"""Forks of ranks: a child of a rank must die with the rank, and must not be forked while a thread of the process group moves.

A rank and its starter use one folder for the sockets of multiprocessing, so that a killed rank leaves none.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from multiprocessing import process

import torch.distributed as dist

from geartrain.plugin_api import STARTED_BY, call_before_forks
from geartrain_parallel.bootstrap import die_with_parent

#: The environment variable that names the starter's folder for the sockets of multiprocessing.
TEMPORARY = "GEARTRAIN_TEMPORARY"
#: Seconds that a fork waits on older Pythons; see ``_settle``.
_SETTLE = 0.005
#: True if forks wait until it is safe, and children that the main thread forks die with this process.
_is_guarded = False
#: Of a thread that is forking: ``is_main``.
_fork = threading.local()


def guard_forks() -> None:
    """Let every later fork of this process wait until it is safe, and every child of the main thread die with this process.

    torch's loader workers look for their parent, but not while they are blocked in writing a batch.
    """
    global _is_guarded
    _is_guarded = True
    call_before_forks(_prepare)


def _prepare() -> None:
    _fork.is_main = threading.current_thread() is threading.main_thread()
    _settle()


def _in_child() -> None:
    if _is_guarded and getattr(
        _fork, "is_main", False
    ):  # the signal follows the thread that forked
        die_with_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def adopt_temporary_folder() -> None:
    """Let this rank use the folder ``pymp-*`` of its starter; see ``share_temporary_folder`` of core."""
    if os.environ.get(STARTED_BY) == str(os.getpid()) and (folder := os.environ.get(TEMPORARY)):
        process.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]


def remove_temporary_folder() -> None:
    """Remove the folder ``pymp-*`` of this process, which is about to end without Python's own cleanup."""
    if folder := process.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)


def _settle() -> None:
    """Let threads of the process group come to rest before a fork.

    Python 3.11 re-creates the lock of its list of threads in a forked child only after it has taken it: if another thread was
    adding itself to the list, the child, a loader worker, hangs. gloo's threads do so just after a collective, to free the tensors that it
    held; measured with a loader worker an epoch: one hang in 300 epochs. Newer Pythons hold the lock themselves while they fork; since
    which one was not looked up.
    """
    if sys.version_info < (3, 13) and dist.is_initialized():
        time.sleep(_SETTLE)
