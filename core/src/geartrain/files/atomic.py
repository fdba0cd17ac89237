"""Write files whole or not at all, also if a kill, a power cut or a full disk interrupts it."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from geartrain.errors import TrainingError, warn

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces ``path`` when the block ends without an error.

    Creates the folder of ``path`` if it does not exist.

    Raises:
        TrainingError: the file could not be written: the disk is full, or the folder is read-only.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    raw: _File | None = None
    try:
        make_folder(path.parent)
        beside.unlink(missing_ok=True)  # of a killed process, or a link of somebody else
        raw = _File(beside, "x")  # which follows no link
        with suppress(OSError):  # a network file system without locks
            _lock(raw)
        file = io.BufferedWriter(raw, 2**20)
        yield file
        file.flush()
        os.fsync(raw.fileno())  # before the rename: a power cut must not leave an empty new file
        raw.close()
        os.replace(beside, path)
        _sync(path.parent)
    except Exception as error:
        # torch.save turns a failed write into a RuntimeError about positions in its archive.
        cause = error if isinstance(error, OSError) else None if raw is None else raw.error
        if cause is None:
            raise
        raise TrainingError(reason(path, cause)) from error
    finally:
        if raw is not None:
            with suppress(OSError):
                raw.close()
            beside.unlink(missing_ok=True)


def remove_abandoned(folder: Path, suffix: str = "", below: bool = False) -> None:
    """Remove the temporary files that killed processes left.

    A file that a process is still writing is locked, and stays.

    Args:
        suffix: of the files that they would have replaced.
        below: look in the folders below too.
    """
    for path in folder.glob("**/.*" if below else ".*") if folder.is_dir() else ():
        is_ours = re.fullmatch(rf"\..+{re.escape(suffix)}\.\d+", path.name)
        if is_ours and path.is_file() and not path.is_symlink():
            with suppress(OSError), path.open("rb") as file:
                _lock(file)
                path.unlink()


def make_folder(path: Path) -> None:
    """Create a folder and those above it, so that they survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync(folder.parent)


class _File(io.FileIO):
    """A file that remembers why a write failed."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _lock(file: IO[bytes]) -> None:
    """Lock a file until it is closed or this process ends, however it ends.

    Raises:
        BlockingIOError: another process has it.
    """
    with suppress(ImportError):  # on Windows, which does not remove an open file
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(folder: Path) -> None:
    with suppress(OSError):  # Windows and some network file systems cannot sync a folder
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def reason(path: Path, error: OSError) -> str:
    """Return the message of the error that a file could not be written."""
    cause = error.strerror or str(error)
    if error.errno not in _FULL:
        hint = "use another output, or allow this user to write there"
        return f"{path} could not be written: {cause}. Fix: {hint}"
    with suppress(OSError):
        cause += f", {shutil.disk_usage(path.parent).free // 2**20} MiB free"
    return f"disk full: {path} could not be written ({cause}). Fix: free space, or another output"


class AppendedFile:
    """A file to which whole pieces are appended.

    If the user removes or moves it, a new one continues, with a warning.

    Raises:
        TrainingError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._name = path, str(path)  # pathlib takes several times as long
        self._open()

    def _open(self) -> None:
        path = self.path
        try:
            # Not buffered: a failed write must raise in append, and not again in close.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise TrainingError(reason(path, error)) from error
        self.size = self._file.seek(0, os.SEEK_END)

    def append(self, data: bytes) -> None:
        """Write all of ``data`` before this returns.

        Raises:
            TrainingError: it could not be written, as on a full disk. The file is as before.
        """
        if not os.path.exists(self._name):  # otherwise the lines would vanish with the open file
            message = f"{self.path} was removed or moved during the run"
            warn(f"{message}. A new file has only what comes from here on")
            self._file.close()
            make_folder(self.path.parent)
            self._open()
        try:
            written = self._file.write(data)
            while written < len(data):
                written += self._file.write(memoryview(data)[written:])
        except OSError as error:
            self._file.truncate(self.size)
            raise TrainingError(reason(self.path, error)) from error
        self.size += len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
