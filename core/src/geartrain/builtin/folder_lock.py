"""Allow one run at a time in a folder: a lock on the folder itself, which leaves no file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from geartrain.errors import UsageError
from geartrain.files.atomic import make_folder
from geartrain.launch.forks import not_inherited

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs of this and other processes out of a folder until the block ends.

    Creates the folder if it does not exist; then removes it at the end if it is empty. The end of
    the process releases the lock too. Windows, and network file systems that cannot lock a folder,
    as NFS, have no lock.

    Raises:
        UsageError: another run uses the folder, or the folder cannot be created.
    """
    existed = folder.exists()
    descriptor = _lock(folder)
    with ExitStack() as stack:
        if descriptor is not None:  # a loader worker must not hold the lock of a killed run
            stack.enter_context(not_inherited(descriptor))
            stack.callback(_unlock, descriptor)
        if not existed:
            stack.callback(_remove_if_empty, folder)
        yield


def _unlock(descriptor: int) -> None:
    with suppress(OSError):  # in a forked child, which has closed it
        # Closing is not enough: a program that is being started holds a copy until its exec.
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _lock(folder: Path) -> int | None:
    """Return the descriptor that holds the lock; ``None`` if folders cannot be locked here."""
    while True:
        try:
            make_folder(folder)
        except OSError as error:
            message = f"output={str(folder)!r} cannot be created: {error.strerror}"
            raise UsageError(f"{message}. Fix: use another folder") from error
        if fcntl is None:
            return None
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:  # a folder that may be written to and not listed
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            message = f"another run uses output={str(folder)!r}, and their files would mix"
            hint = "use another folder, or wait until that run has ended"
            raise UsageError(f"{message}. Fix: {hint}") from None
        except FileNotFoundError:
            pass
        except OSError:  # NFS: EBADF, or ENOLCK without its lock daemon
            os.close(descriptor)
            return None
        os.close(descriptor)  # another run has just removed the empty folder: try again
