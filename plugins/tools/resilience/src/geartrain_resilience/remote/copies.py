"""Local copies of remote checkpoints: ``ckpt_path="s3://bucket/runs/7/last.ckpt"``."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from filelock import FileLock

from geartrain import UsageError
from geartrain_resilience.remote.store import Store, check_url


def local_copy(given: object, name: str) -> Path:
    """Download a file, and return its copy, in ``~/.cache/geartrain`` or ``$XDG_CACHE_HOME``.

    All processes of a node share the copy. It is used again until the file in the store changes.

    Args:
        given: the URL.
        name: the option, for errors.

    Raises:
        UsageError: no URL, or no such file.
        TrainingError: the store cannot be reached.
    """
    url = check_url(given, name)
    store = Store(url)
    version = store.version()
    if version is None:
        raise UsageError(f"{name}={url!r}: there is no such file. Fix: pass an existing file")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "geartrain"
    folder = cache / hashlib.sha256(url.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, mark = folder / url.rpartition("/")[2], folder / "version"
    with FileLock(folder / "lock"):
        if not (path.exists() and mark.exists() and mark.read_text("utf-8") == version):
            mark.unlink(missing_ok=True)
            store.get("", path)
            mark.write_text(version, "utf-8")
    return path
