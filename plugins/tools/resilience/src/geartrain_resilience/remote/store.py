"""A folder of a remote store, through fsspec: complete files in, complete files out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import replacing

#: Stores in which an object appears when its upload is complete, and not before.
_ATOMIC = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
#: The end of an archive has its comment: epochs, steps, and batches of the epoch. The checksum of
#: its last record is there too.
_TAIL = 200
_PROGRESS = re.compile(rb"geartrain (\d+) (\d+) (\d+)\n\Z")

#: How far a run was: epochs, steps, and batches of the epoch.
Progress = tuple[int, int, int]


def check_url(url: Any, name: str) -> str:
    """Return a URL of a store whose package is installed. Connect to nothing.

    Args:
        name: whose URL it is, for errors.

    Raises:
        UsageError: it is no URL, contains a secret, or its store cannot be used.
    """
    if not isinstance(url, str) or "://" not in url or "::" in url:
        hint = "a string such as 's3://bucket/runs/7'; for a folder 'file:///folder'"
        raise UsageError(f"{name}={str(url)!r} is not a URL. Fix: {hint}")
    parts = urlsplit(url)
    if parts.query or parts.password is not None:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise UsageError(
            f"{name}={shown!r} was given with a password or a query, which would reach files and "
            "logs of the run. Fix: leave it out, and pass keys in the environment of the store "
            "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...) or of fsspec (FSSPEC_...)"
        )
    try:
        cls = fsspec.get_filesystem_class(parts.scheme)
    except (ImportError, ValueError) as error:
        hint = "use one that fsspec knows" if isinstance(error, ValueError) else "install it"
        raise UsageError(f"{name}={url!r} cannot be used: {error}. Fix: {hint}") from error
    if not cls._strip_protocol(url).strip("/"):
        raise UsageError(f"{name}={url!r} names no folder. Fix: such as {url.rstrip('/')}/runs/7")
    return url.rstrip("/")


class Store:
    """The folder of a store at a URL. Names are relative to it, with ``/``.

    Each thread makes its own object: connections are of a thread and a process.

    Raises:
        TrainingError: the store cannot be reached; also in each method.
    """

    def __init__(self, url: str) -> None:
        self.url, self._scheme = url, urlsplit(url).scheme
        with self._errors("be opened"):
            self._fs, self._root = fsspec.core.url_to_fs(url)

    @contextmanager
    def _errors(self, action: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except (TrainingError, UsageError):
            raise
        except Exception as error:  # each store has its own
            place = f"{self.url}/{name}" if name else self.url
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise TrainingError(
                f"{place} could not {action}: {reason}. "
                "Fix: look at the store, its address and its keys, then resume"
            ) from error

    def files(self) -> dict[str, int]:
        """Return the sizes of all files by name, in bytes, except hidden ones.

        Half-written files are hidden. So are names that lead out of the folder (``..``), which a
        stranger may have written.
        """
        with self._errors("be listed"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root.rstrip("/")) + 1
        named = {path[start:]: int(info["size"]) for path, info in found.items()}
        return {name: size for name, size in named.items() if not is_hidden(name)}

    def version(self) -> str | None:
        """Return a value that differs once the file at the URL itself has changed.

        Returns:
            ``None`` if there is no such file.
        """
        with self._errors("be read"):
            self._fs.invalidate_cache()
            try:
                facts = self._fs.info(self._root)
            except FileNotFoundError:
                return None
        return None if facts["type"] == "directory" else str(sorted(facts.items(), key=str))

    def tails(self, files: dict[str, int]) -> dict[str, bytes]:
        """Return the last bytes of each file that has any."""
        files = {name: size for name, size in files.items() if size}
        if not files:
            return {}
        paths = [f"{self._root}/{name}" for name in files]
        starts = [max(0, size - _TAIL) for size in files.values()]
        with self._errors("be read"):
            found = self._fs.cat_ranges(paths, starts, list(files.values()), on_error="raise")
        return dict(zip(files, found, strict=True))

    def put(self, source: Path, name: str) -> None:
        """Upload a file. Until it is complete, the store has the earlier one."""
        with self._errors("be uploaded", name):
            path = f"{self._root}/{name}"
            if self._scheme in _ATOMIC:
                self._fs.put_file(str(source), path)
                return
            folder, _, last = path.rpartition("/")
            self._fs.makedirs(folder, exist_ok=True)
            beside = f"{folder}/.{last}.{os.getpid()}"
            self._fs.put_file(str(source), beside)
            self._fs.mv(beside, path)

    def get(self, name: str, target: Path) -> None:
        """Download a file, which replaces ``target`` when it is complete; ``""``: the URL's own."""
        with self._errors("be downloaded", name), replacing(target) as file:
            # By its path: s3fs opens the file itself.
            self._fs.get_file(f"{self._root}/{name}" if name else self._root, str(file.name))

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        with self._errors("be deleted", name):
            try:
                self._fs.rm_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return


def is_hidden(name: str) -> bool:
    """True if a file or a folder above it has no name, or one that starts with a dot."""
    return any(not part or part.startswith(".") for part in name.split("/"))


def tail(path: Path) -> bytes:
    """Return the last bytes of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        return file.read()


def progress(end: bytes) -> Progress | None:
    """Return how far the run was that saved a checkpoint, from the last bytes of the file."""
    found = _PROGRESS.search(end)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))
