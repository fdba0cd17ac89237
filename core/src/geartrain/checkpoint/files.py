"""A checkpoint's file: the archive of ``torch.save``, whose checksums are compared before a read.

``torch.load`` does not compare them. The comment of the ZIP archive has the progress, so that the
furthest of many checkpoints is found without reading their contents.
"""

from __future__ import annotations

import os
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

from geartrain.errors import TrainingError, UsageError
from geartrain.files.atomic import replacing
from geartrain.module.nested import not_plain

#: The beginning and the end of the comment of an archive that geartrain wrote.
_MARK, _END = b"geartrain ", b"\n"


def write(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint whole or not at all.

    Raises:
        TrainingError: the disk is full, the folder cannot be written to, or no run could read it.
    """
    fit = state.get("fit") or {}
    for name, value in state.items():
        if (kind := not_plain(value)) is not None:
            message = f"a checkpoint with {kind} under {name!r} could not be read again"
            raise TrainingError(f"{message}. Fix: tensors, numbers, strings, lists, dicts of them")
    done = " ".join(str(fit.get(name, "")) for name in ("epoch", "step", "batch_idx"))
    comment = _MARK + done.encode() + _END
    with replacing(path) as file:
        # The program may have turned checksums off.
        with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
            torch.save(state, file)
        file.seek(-2, os.SEEK_END)  # the length of the comment, which torch leaves empty
        file.write(len(comment).to_bytes(2, "little") + comment)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, or a file of ``torch.save`` that geartrain did not write. Runs no code.

    Raises:
        UsageError: the file does not exist.
        TrainingError: it is damaged, or no checkpoint.
    """
    check(path)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own message advises to run code from the file
        raise TrainingError(
            f"{path} could not be read as a checkpoint ({type(error).__name__}): it is of another "
            "kind, damaged, or holds more than tensors and plain values. Fix: use another file"
        ) from error
    return state


def check(path: Path) -> bool:
    """Compare a file's contents with its checksums; return ``False`` if geartrain did not write it.

    Raises:
        UsageError: the file does not exist.
        TrainingError: it is damaged.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise UsageError(f"there is no checkpoint {path}. Fix: pass an existing file") from error
    except OSError as error:
        message = f"{path} could not be read: {error.strerror}"
        raise TrainingError(f"{message}. Fix: use another file") from error
    with file, suppress(Exception):  # damage may make any error
        begin = file.read(2).strip(b"\0")  # a power cut leaves zeros
        if begin not in (b"", b"PK") and not zipfile.is_zipfile(file):
            return False
        with zipfile.ZipFile(file) as archive:
            is_ours, is_cut = archive.comment.startswith(_MARK), archive.comment[-1:] != _END
            # torch does not read an entry with a folder's attribute: its tensor has any values.
            unread = any(entry.external_attr & 16 for entry in archive.infolist())
            if not (unread or (is_ours and is_cut)) and archive.testzip() is None:
                return is_ours
    raise TrainingError(
        f"{path} is damaged: its contents do not match its checksums. "
        "Fix: use another file; 'last' and 'auto' take the newest undamaged one"
    )


def progress(path: Path) -> tuple[int, int, int] | None:
    """Return the epochs, steps and batches of the epoch in a file's comment; it reads no more."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(-min(100, path.stat().st_size), os.SEEK_END)
        if found := re.search(_MARK + rb"(\d+) (\d+) (\d+)" + _END + rb"\Z", file.read()):
            epochs, steps, batches = map(int, found.groups())
            return epochs, steps, batches
    return None
