"""A checkpoint's file: the archive of ``torch.save`` and a digest, so that damage is detected.

The digest is the comment of the ZIP archive, which ``torch.load`` and ``unzip`` ignore. torch's own
checksums do not help: ``torch.load`` does not compare them. The comment also has the progress, so
that the furthest of many checkpoints is found without opening their archives.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from geartrain.errors import TrainingError, UsageError
from geartrain.files.atomic import replacing

#: The comment is this, the SHA-256, in hexadecimal digits, of the archive without a comment and of
#: the progress, and the progress: three numbers, or blanks if no ``fit`` can resume from the file.
_MARK = b"geartrain sha256 "
_COMMENT = len(_MARK) + 64 + 39
#: The end of an archive without a comment: this, 16 bytes, and two for the length of the comment.
_END, _END_SIZE = b"PK\5\6", 22


def write(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with its digest, whole or not at all.

    Raises:
        TrainingError: the disk is full, or the folder cannot be written to.
    """
    with replacing(path) as file:
        hashing = _Hashing(file)
        torch.save(state, hashing)  # type: ignore[arg-type]  # it needs only these two methods
        fit = state.get("fit") or {}
        numbers = [str(fit.get(name, ""))[:12] for name in ("epoch", "step", "batch_idx")]
        done = "".join(f"{number:>13}" for number in numbers).encode()
        hashing.digest.update(done)
        file.seek(-2, os.SEEK_END)
        digest = hashing.digest.hexdigest().encode()
        file.write(_COMMENT.to_bytes(2, "little") + _MARK + digest + done)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, or a file of ``torch.save`` that geartrain did not write. Runs no code.

    Raises:
        UsageError: the file does not exist.
        TrainingError: it is damaged, or no checkpoint.
    """
    is_whole = check(path)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own message advises to run code from the file
        raise TrainingError(
            f"{path} could not be read as a checkpoint ({type(error).__name__}): it is of another "
            "kind, damaged, or holds more than tensors and plain values. Fix: use another file"
        ) from error
    if is_whole or not isinstance(state, dict):
        return state
    if "geartrain" in state and "saved_by" not in state:  # a plugin's file has no digest
        raise TrainingError(
            f"{path} is damaged, or was saved again by another program: it is a checkpoint of "
            "geartrain without its digest. Fix: use another file; a file of your own weights is "
            "torch.save({'model': ...}), without the key 'geartrain'"
        )
    return state


def check(path: Path) -> bool:
    """Compare a file's bytes with its digest; return ``False`` if geartrain did not write it.

    Raises:
        UsageError: the file does not exist.
        TrainingError: it is damaged.
    """
    try:
        with path.open("rb") as file:
            return _check(file, path)
    except FileNotFoundError as error:
        raise UsageError(f"there is no checkpoint {path}. Fix: pass an existing file") from error
    except OSError as error:
        message = f"{path} could not be read: {error.strerror}"
        raise TrainingError(f"{message}. Fix: use another file") from error


def progress(path: Path) -> tuple[int, int, int] | None:
    """Return the epochs, steps and batches of the epoch in a file's comment; it reads no more."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        file.seek(-_COMMENT, os.SEEK_END)
        comment = file.read()
        if comment.startswith(_MARK):
            epochs, steps, batches = map(int, comment[len(_MARK) + 64 :].split())
            return epochs, steps, batches
    return None


def _check(file: IO[bytes], path: Path) -> bool:
    begin = file.read(4)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _COMMENT - _END_SIZE))
    tail = file.read()
    end, comment = tail[:_END_SIZE], tail[_END_SIZE:]
    is_end = end[:4] == _END and comment.startswith(_MARK)
    # torch.save ends an archive without a comment; a power cut leaves zeros.
    is_torchs = begin[:2] != b"PK" or (tail[-_END_SIZE:][:4] == _END and tail[-2:] == bytes(2))
    if is_end and len(comment) == _COMMENT == int.from_bytes(end[-2:], "little"):
        digest = hashlib.sha256()
        file.seek(0)
        remaining, buffer = size - _COMMENT - 2, memoryview(bytearray(2**20))
        while remaining:
            count = file.readinto(buffer[: min(remaining, len(buffer))])  # type: ignore[attr-defined]
            if not count:
                break
            digest.update(buffer[:count])
            remaining -= count
        digest.update(bytes(2) + comment[len(_MARK) + 64 :])
        if comment[len(_MARK) :].startswith(digest.hexdigest().encode()):
            return True
    elif tail.strip(b"\0") and _MARK not in tail and is_torchs:
        return False
    raise TrainingError(
        f"{path} is damaged: its contents do not match its digest. "
        "Fix: use another file; 'last' and 'auto' take the newest undamaged one"
    )


class _Hashing:
    """A file for ``torch.save`` that computes the digest of the bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()
        self.flush = file.flush

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)
