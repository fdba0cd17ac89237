"""The batch-size finder: which is the largest batch whose training step runs without running out of memory."""

from __future__ import annotations

import errno
import gc
import re
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from geartrain import Run, UsageError, hookimpl
from geartrain.plugin_api import BatchSizer, length, loader_batch_size

#: What errors of other classes say when memory is short: the CPU's allocator (Linux, Windows), C++, CUDA's libraries, Metal.
_SHORT = re.compile(
    r"can't allocate memory|not enough memory: you tried to allocate|std::bad_alloc|out of memory|CU\w+_STATUS_(?:\w+_)?ALLOC\w*_FAILED",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch size that was tried."""

    batch_size: int
    #: Samples a second in the steps, without loading; without the first step if there are several. ``None``: it did not run.
    samples_per_second: float | None = None
    #: The error of the memory that ran out; empty if it ran.
    error: str = ""

    @property
    def ran(self) -> bool:
        return not self.error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or the error that it was raised from, says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError) and _SHORT.search(str(error)):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def search(
    mode: str,
    first: int,
    trials: int,
    attempt: Callable[[int], bool],
    bound: Callable[[], int | None],
) -> tuple[int, str]:
    """Look for the largest size that ``attempt`` says runs.

    Args:
        mode: ``"power"`` doubles until one does not run; ``"binsearch"`` then halves the gap until it is closed. If not even the
            first runs, both halve it until one does.
        first: the size to begin with.
        trials: how many sizes to try at most.
        attempt: tries one.
        bound: samples that there are; asked after an attempt that ran; ``None`` if unknown.

    Returns:
        The size, 0 if none ran, and why it is not larger.
    """
    low, high, size, most = (
        0,
        0,
        first,
        bound(),
    )  # the largest that ran, the smallest that did not, the next, all that there are
    for _ in range(trials):
        if attempt(size):
            low = size
            most = bound()
            if most is not None and low >= most:
                return most, f"{most} samples are all that there are"
        else:
            high = size
        if high == 0:
            size = low * 2 if most is None else min(low * 2, most)
        elif low == 0 or (mode == "binsearch" and high - low > 1):
            size = (low + high) // 2
        else:
            size = 0
        if size == 0:
            return low, f"{high} does not run"
    return low, f"{trials} sizes were tried, and no more were asked for"


class StepTimer:
    """The plugin of one trial: sees that the loader took the batch size, and times steps.

    Args:
        size: the batch size that was set.
        setting: the name of the setting, for errors.

    Raises:
        UsageError: the loader has another.
    """

    def __init__(self, size: int, setting: str) -> None:
        #: Samples that the loader draws in one pass; ``None`` if it has no length.
        self.samples: int | None = None
        self._size, self._setting = size, setting
        self._steps: list[tuple[int, float]] = []

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        loader = run.stages["train"].loaders[0]
        self._sizer = BatchSizer(loader)
        self._compare(loader_batch_size(loader))
        for thing in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
            if (samples := length(thing)) is not None:
                self.samples = samples
                return

    @hookimpl(wrapper=True)
    def step(self, run: Run, micro_batches: Sequence[Any]) -> Generator[None, None, None]:
        sizes = [self._sizer.size(batch) or 0 for batch in micro_batches]
        if sizes[0] > self._size:
            self._compare(sizes[0])
        elif not self._steps and self.samples is None and 0 < sizes[0] < self._size:
            self.samples = sizes[0]  # the first batch is not full: there are no more
        began = time.perf_counter()
        yield
        if run.device.type != "cpu":
            torch.accelerator.synchronize(run.device)
        self._steps.append((sum(sizes), time.perf_counter() - began))

    @property
    def samples_per_second(self) -> float:
        counted = (
            self._steps[1:] or self._steps
        )  # the first one sets memory up and chooses algorithms
        return sum(size for size, _ in counted) / max(sum(seconds for _, seconds in counted), 1e-9)

    def _compare(self, size: int | None) -> None:
        if size is not None and size != self._size:
            raise UsageError(
                f"{self._setting} is {self._size}, and the training loader has batches of {size}. "
                f"Fix: let train_dataloader read it, as DataLoader(..., batch_size=self.{self._setting.rpartition('.')[2]})"
            )


def free(error: BaseException | None, device: torch.device | None) -> None:
    """Free the memory of a trial: frames of a traceback keep their tensors alive, and torch keeps freed memory for itself."""
    seen: set[int] = set()
    left = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]
    gc.collect()
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def setting_of(owners: Sequence[Any], name: str) -> Any:
    """Return the first of the DataModule and the module that has a batch size to set.

    Raises:
        UsageError: none of them has.
    """
    for owner in owners:
        if hasattr(owner, name) or name in getattr(owner, "hparams", {}):
            return owner
    asked = " and ".join(type(owner).__name__ for owner in owners)
    raise UsageError(
        f"there is no {name!r} to set on {asked}. Fix: self.{name} in __init__, and DataLoader(..., batch_size=self.{name}) in "
        "train_dataloader; or batch_arg_name, if it has another name"
    )


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, or the hyperparameter of that name, or both if both exist.

    Raises:
        UsageError: it cannot be set.
    """
    if hasattr(owner, name):
        try:
            setattr(owner, name, value)
        except AttributeError as error:
            raise UsageError(
                f"{type(owner).__name__}.{name} cannot be set: {error}. Fix: an attribute, not a property"
            ) from error
    if name in getattr(owner, "hparams", {}):
        owner.hparams[name] = value
