"""``async_checkpoint``: write checkpoints in the background, while training continues."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from geartrain import Run, TrainingError, UsageError, hookimpl
from geartrain_callbacks.checkpoint_names import UNWRITTEN

#: Values that never change, so that a copy can share them.
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class AsyncCheckpoint:
    """Write the checkpoints of a ``fit`` in a thread, while training continues.

    A save copies the state and returns. Its file is written meanwhile, under a temporary name, and
    gets its name when it is complete: until then the newest complete file stays the newest. Each
    save waits until the file before it is complete, so at most one is behind. Then
    ``on_checkpoint_saved`` is called for that file, and ModelCheckpoint deletes what it replaces.

    Every file is complete when ``fit`` returns, also after an error or Ctrl-C. If a file cannot be
    written, the next save or the end of ``fit`` raises the error. The copy takes as much memory as
    a checkpoint, on the CPU; it is kept until ``fit`` ends.

    Outside of ``fit`` and in a Session, checkpoints are written as without this plugin.

    Raises:
        UsageError: a strategy or another plugin writes checkpoints itself.
    """

    #: Core's writer, which this plugin calls in its thread.
    replaces = frozenset({"save_checkpoint"})

    def __init__(self) -> None:
        self._on = False
        self._writer: _Writer | None = None
        self._copies = _Copies()
        #: The file that is being written, on every rank.
        self._path: Path | None = None
        self._saved: Callable[..., Any] | None = None

    @hookimpl(wrapper=True)
    def on_run_start(self, run: Run) -> Generator[None, Any, Any]:
        for owner in run.hooks.passed_over("save_checkpoint"):
            if not owner.is_core:
                raise UsageError(
                    f"{owner.label} writes checkpoints itself, so that "
                    "geartrain-callbacks[async_checkpoint] cannot. Fix: leave async_checkpoint out"
                )
        self._end()
        self._on = run.command == "fit" and run.mode != "session"
        if self._on:
            self._saved = run.hooks.replace_caller("on_checkpoint_saved", self._when_complete)
        return (yield)

    @hookimpl
    def save_checkpoint(self, run: Run, state: dict[str, Any], path: Path) -> None:
        write = next(p.plugin for p in run.hooks.parts if p.info.kind == "default").save_checkpoint
        # The file is one of core's, which needs no plugin to be read.
        state = {name: value for name, value in state.items() if name != "saved_by"}
        if not self._on:
            write(run=run, state=state, path=path)
            return
        self._finish(run)
        self._path = path
        if run.world.rank == 0:
            copied, ready = self._copies.of(state)
            self._writer = _Writer(path, ready, lambda: write(run=run, state=copied, path=path))

    # Wrappers, so that the files are complete before other plugins and the module read them.

    @hookimpl(wrapper=True)
    def on_train_end(self, run: Run) -> Generator[None, Any, Any]:
        self._finish(run)
        return (yield)

    @hookimpl(wrapper=True)
    def on_run_end(self, run: Run) -> Generator[None, Any, Any]:
        self._finish(run)
        try:
            return (yield)
        finally:
            self._close(run)

    @hookimpl(wrapper=True, specname="on_exception")
    def _on_exception(self, run: Run) -> Generator[None, Any, Any]:
        failure: TrainingError | None = None
        try:
            if self._writer is not None:
                self._writer.wait()  # without the other ranks, which may be gone
        except TrainingError as caught:  # raised after the other plugins' clean-up
            failure = caught
        self._on, self._path, self._writer = False, None, None  # save_on_exception writes at once
        try:
            result = yield
        finally:
            self._close(run)
        if failure is not None:
            raise failure
        return result

    def _when_complete(self, run: Run, path: Path) -> None:
        """Call ``on_checkpoint_saved``, unless the file is still being written."""
        if path != self._path and self._saved is not None:
            self._saved(run=run, path=path)

    def _finish(self, run: Run) -> None:
        """Wait until the last file is complete, on all ranks, and call ``on_checkpoint_saved``.

        Raises:
            TrainingError: it could not be written.
        """
        path, writer = self._path, self._writer
        if path is None:
            return
        if writer is not None:
            writer.wait()
        self._path = self._writer = None
        if run.world.size > 1:
            run.hooks.barrier(run=run)
        if self._saved is not None:
            self._saved(run=run, path=path)

    def _close(self, run: Run) -> None:
        if self._saved is not None:
            run.hooks.replace_caller("on_checkpoint_saved", self._saved)
        self._end()

    def _end(self) -> None:
        self._on, self._path, self._writer, self._saved = False, None, None, None
        self._copies = _Copies()


class _Writer:
    """A thread that writes one file.

    It is no daemon: if the program ends by a second Ctrl-C, Python waits for it.
    """

    def __init__(self, path: Path, ready: Callable[[], None], write: Callable[[], None]) -> None:
        self._path, self._ready, self._write = path, ready, write
        # A thread's ``join`` would not do: after a Ctrl-C in it, Python 3.11 takes the thread for
        # ended (https://github.com/python/cpython/issues/90882).
        self._done = threading.Event()
        self._error: BaseException | None = None
        UNWRITTEN.add(path)
        threading.Thread(target=self._run, name="geartrain async_checkpoint").start()

    def _run(self) -> None:
        try:
            self._ready()
            self._write()
        except BaseException as error:
            self._error = error
        finally:
            UNWRITTEN.discard(self._path)
            self._done.set()

    def wait(self) -> None:
        """Return when the file is complete.

        Raises:
            TrainingError: it could not be written; raised once.
        """
        self._done.wait()
        error, self._error = self._error, None
        if isinstance(error, TrainingError):
            raise error
        if error is not None:
            message = f"{self._path} could not be written: {type(error).__name__}: {error}"
            raise TrainingError(message) from error


class _Copies:
    """Copies of states in memory that is used again: new memory would cost more than the copy."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def of(self, state: Any) -> tuple[Any, Callable[[], None]]:
        """Return a copy of a state, and a function that waits until a GPU has copied its part.

        Tensors that share memory do so in the copy too: such as tied weights.
        """
        copied = _Copy(self._buffers)
        result = copied.of(state)
        del self._buffers[copied.used :]
        if copied.device is None:
            return result, _nothing
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(copied.device))
        return result, event.synchronize


class _Copy:
    """One copy: the memory that it has used so far."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers, self.used = buffers, 0
        #: Address of the original memory -> the copy.
        self._copied: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        #: The GPU, if a tensor is on one.
        self.device: torch.device | None = None

    def of(self, value: Any) -> Any:
        """Return a copy of a value of a checkpoint."""
        kind = type(value)
        if kind in _CONSTANTS:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is dict:
            return {key: self.of(item) for key, item in value.items()}
        if kind in (list, tuple):
            if all(type(item) in _CONSTANTS for item in value):  # such as Python's random state
                return kind(value)
            return kind(map(self.of, value))
        if isinstance(value, dict):  # an OrderedDict with the attributes of a state_dict
            same = copy.copy(value)
            for key, item in value.items():
                same[key] = self.of(item)
            return same
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        is_plain = is_plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        if not is_plain or tensor.device.type not in ("cpu", "cuda"):
            return tensor.cpu().clone()
        storage = tensor.untyped_storage()
        place = tensor.device, storage.data_ptr()
        if place not in self._copied:
            self._copied[place] = self._bytes(storage, tensor.device)
        same = torch.empty(0, dtype=tensor.dtype)
        return same.set_(
            self._copied[place],
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )

    def _bytes(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        size, on_gpu = storage.nbytes(), device.type == "cuda"
        buffer = self._buffers[self.used] if self.used < len(self._buffers) else None
        if buffer is None or buffer.numel() != size or buffer.is_pinned() is not on_gpu:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
            self._buffers[self.used : self.used + 1] = [buffer]
        self.used += 1
        source = torch.empty(0, dtype=torch.uint8, device=device)
        source.set_(storage)
        buffer.copy_(source, non_blocking=on_gpu)
        self.device = device if on_gpu else self.device
        return buffer.untyped_storage()


def _nothing() -> None:
    """Do nothing: the CPU has copied."""
