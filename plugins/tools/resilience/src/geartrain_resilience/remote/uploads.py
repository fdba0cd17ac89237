"""Upload the files of a folder that have changed, in a thread."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

from geartrain_resilience.remote.store import Store, is_hidden

#: Files that only the machine of the run needs.
_LOCAL = {"run.lock", "preempt"}
SUFFIX = ".ckpt"
#: The folder, in that of the run, of what is being uploaded.
STAGED = ".remote"


def files_in(folder: Path) -> dict[str, Path]:
    """Return the files of a run by name, relative to its folder; not hidden ones."""
    found = {}
    for place, _, names in os.walk(folder):  # which follows no link to a folder
        for path in (Path(place, name) for name in sorted(names)):
            name = path.relative_to(folder).as_posix()
            if not is_hidden(name) and name not in _LOCAL and path.is_file():
                found[name] = path
    return found


class Uploads:
    """Copies a run's folder to a store. A call waits for the one before, so one is behind.

    Args:
        known: files that the store has already: name -> the file's :func:`stamp`.
        stored: the names of all checkpoints in the store.
    """

    def __init__(self, url: str, folder: Path, known: dict[str, object], stored: set[str]) -> None:
        self._url, self._folder, self._known, self._stored = url, folder, known, stored
        #: The upload that runs. A thread's ``join`` would not do: after a Ctrl-C in it, Python 3.11
        #: takes the thread for ended (https://github.com/python/cpython/issues/90882).
        self._running: Future[None] | None = None
        #: True once an error was raised: nothing is uploaded after it.
        self._failed = False

    def start(self) -> None:
        """Upload what has changed, in the background, after the uploads before.

        Checkpoints that no longer exist are deleted from the store afterwards.

        Raises:
            TrainingError: an earlier upload failed.
        """
        self.wait()
        if self._failed:
            return
        staged = self._folder / STAGED
        staged.mkdir(parents=True, exist_ok=True)
        files = files_in(self._folder)
        changed: dict[str, Path] = {}
        stamps: dict[str, object] = {}
        # Checkpoints come last: a kill must not leave one without the metrics before it.
        for name in sorted(files, key=lambda name: (name.endswith(SUFFIX), name)):
            try:
                before = stamp(files[name])
                if self._known.get(name) == before:
                    continue
                copy = staged / str(len(changed))
                copy.unlink(missing_ok=True)
                _stage(files[name], copy, name.endswith(SUFFIX))
                stamps[name], changed[name] = before, copy
            except FileNotFoundError:  # removed meanwhile
                continue
        kept = {name for name in files if name.endswith(SUFFIX)}
        gone = self._stored - kept if "plan.json" in files else set()
        running: Future[None] = Future()
        threading.Thread(
            # If a second Ctrl-C ends the program, Python does not wait for the store.
            target=self._upload,
            args=(changed, gone, running),
            name="geartrain remote",
            daemon=True,
        ).start()
        self._running = running
        # Not before: after a Ctrl-C above, the next call begins again.
        self._known.update(stamps)
        self._stored = kept | (self._stored - gone)
        for name in gone:
            self._known.pop(name, None)

    def _upload(self, changed: dict[str, Path], gone: set[str], running: Future[None]) -> None:
        try:
            store = Store(self._url)
            for name, copy in changed.items():
                store.put(copy, name)
                copy.unlink(missing_ok=True)
            for name in sorted(gone):
                store.delete(name)
            running.set_result(None)
        except BaseException as error:
            running.set_exception(error)

    def wait(self) -> None:
        """Return when all uploads are done.

        Raises:
            TrainingError: one failed.
        """
        if self._running is None:
            return
        error = self._running.exception()
        self._running = None
        if error is not None:
            self._failed = True
            raise error

    def finish(self, only_after_checkpoint: bool = False) -> None:
        """Upload the rest and wait for it.

        Args:
            only_after_checkpoint: not if the run has no checkpoint: it failed early, and the next
                attempt may use the same URL.

        Raises:
            TrainingError: an upload failed.
        """
        try:
            has_checkpoint = any(name.endswith(SUFFIX) for name in files_in(self._folder))
            if has_checkpoint or not only_after_checkpoint:
                self.start()
            self.wait()
        finally:
            if self._running is None:  # after Ctrl-C it still reads these files
                shutil.rmtree(self._folder / STAGED, ignore_errors=True)


def stamp(path: Path) -> object:
    """Return a value that differs once a file has changed."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _stage(path: Path, copy: Path, links: bool) -> None:
    """Keep the contents of a file as they are now; a checkpoint is replaced and never changed."""
    if links:
        try:
            os.link(path.resolve(), copy)
            return
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            pass
    shutil.copyfile(path, copy)
