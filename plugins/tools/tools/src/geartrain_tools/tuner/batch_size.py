"""The batch-size finder: find the largest batch whose training step fits in memory."""

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
from geartrain.plugin_api import BatchSizer, length

#: Out-of-memory messages of other error classes: the CPU's allocator (Linux, Windows), C++, CUDA's
#: libraries, Metal.
_SHORT = re.compile(
    r"can't allocate memory|not enough memory: you tried to allocate|std::bad_alloc|"
    r"out of memory|CU\w+_STATUS_(?:\w+_)?ALLOC\w*_FAILED",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A batch size that was tried."""

    batch_size: int
    #: Samples per second of the steps, without loading, and without the first of several steps.
    #: ``None`` if the batch did not fit.
    samples_per_second: float | None = None
    #: The out-of-memory error; empty if the batch fitted.
    error: str = ""

    @property
    def ran(self) -> bool:
        return not self.error


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error, or the error that it was raised from, reports that memory ran out."""
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
    """Find the largest size for which ``attempt`` returns True.

    Args:
        mode: ``"power"`` doubles until a size does not run; ``"binsearch"`` then bisects the gap.
            If the first size does not run, both halve it until a size runs.
        first: the size to begin with.
        trials: the most sizes to try.
        attempt: tries one size.
        bound: returns the number of samples, ``None`` if unknown; called after a size that ran.

    Returns:
        The size (0 if none ran), and the reason why it is not larger.
    """
    # The largest size that ran, the smallest that did not, the next, and the number of samples.
    low, high, size, most = 0, 0, first, bound()
    for _ in range(trials):
        if attempt(size):
            low = size
            most = bound()
            if most is not None and low >= most:
                return most, f"the data has only {most} samples"
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
    return low, f"{trials} sizes were tried, which is the limit"


class StepTimer:
    """The plugin of one trial: check that the loader uses the batch size, and time the steps.

    Args:
        size: the batch size that was set.
        setting: the name of the setting, for errors.

    Raises:
        UsageError: the loader uses another batch size.
    """

    def __init__(self, size: int, setting: str) -> None:
        #: Samples that the loader draws in one pass; ``None`` if unknown.
        self.samples: int | None = None
        self._size, self._setting = size, setting
        self._steps: list[tuple[int, float]] = []

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        loader = run.stages["train"].loaders[0]
        self._sizer = BatchSizer(loader)
        self._compare(self._sizer.loader_batch_size)
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
            self.samples = sizes[0]  # the first batch is not full, so the data has no more samples
        began = time.perf_counter()
        yield
        if run.device.type != "cpu":
            torch.accelerator.synchronize(run.device)
        self._steps.append((sum(sizes), time.perf_counter() - began))

    @property
    def samples_per_second(self) -> float:
        # The first step allocates memory and selects algorithms, so it is slow.
        counted = self._steps[1:] or self._steps
        return sum(size for size, _ in counted) / max(sum(seconds for _, seconds in counted), 1e-9)

    def _compare(self, size: int | None) -> None:
        if size is not None and size != self._size:
            name = self._setting.rpartition(".")[2]
            raise UsageError(
                f"{self._setting} is {self._size}, and the training loader has batches of {size}. "
                f"Fix: let train_dataloader read it, as DataLoader(..., batch_size=self.{name})"
            )


def free(error: BaseException | None, device: torch.device | None) -> None:
    """Free a trial's memory: an error's frames keep tensors alive, and torch caches memory."""
    seen: set[int] = set()
    remaining = [error]
    while remaining:
        candidate = remaining.pop()
        if candidate is not None and id(candidate) not in seen:
            seen.add(id(candidate))
            traceback.clear_frames(candidate.__traceback__)
            candidate.__traceback__ = None
            remaining += [candidate.__cause__, candidate.__context__]
    gc.collect()
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def setting_of(owners: Sequence[Any], name: str) -> Any:
    """Return the DataModule or the module, the first that has a batch size to set.

    Raises:
        UsageError: neither has one.
    """
    for owner in owners:
        if hasattr(owner, name) or name in getattr(owner, "hparams", {}):
            return owner
    asked = " and ".join(type(owner).__name__ for owner in owners)
    raise UsageError(
        f"there is no {name!r} to set on {asked}. Fix: self.{name} in __init__, and "
        f"DataLoader(..., batch_size=self.{name}) in "
        "train_dataloader; or batch_arg_name, if it has another name"
    )


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, or the hyperparameter of that name; both if both exist.

    Raises:
        UsageError: it cannot be set.
    """
    if hasattr(owner, name):
        try:
            setattr(owner, name, value)
        except AttributeError as error:
            raise UsageError(
                f"{type(owner).__name__}.{name} cannot be set: {error}. "
                "Fix: use an attribute, not a property"
            ) from error
    if name in getattr(owner, "hparams", {}):
        owner.hparams[name] = value
