"""``capture_check``: what in a step breaks a CUDA graph, found on any device."""

from __future__ import annotations

import linecache
import random
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from geartrain import hookimpl
from geartrain.plugin_api import is_of_user

if TYPE_CHECKING:
    from geartrain import Run

_READS = "reads a number of the device: keep the tensor, which self.log takes too"
_COPIES = "copies to the host: move what needs it out of the step"
_SHAPES = "makes a shape that depends on data: use a mask of a fixed size, as torch.where"
_VALUES = "makes a tensor of Python values: make it once, outside of the step"
_DRAWS = "draws from a generator of Python, which a graph would repeat: draw with torch"
#: Methods of a tensor that make the CPU wait for its device.
_METHODS = {
    **dict.fromkeys(("item", "__bool__", "__int__", "__float__", "__index__", "tolist"), _READS),
    **dict.fromkeys(("cpu", "numpy", "__array__"), _COPIES),
}


@dataclass(frozen=True)
class Reason:
    """A line of the user's, and why a graph cannot contain it."""

    file: str
    #: 0 if it is not known.
    line: int
    text: str

    def __str__(self) -> str:
        if not self.line:
            return f"{self.file}\n    {self.text}"
        source = linecache.getline(self.file, self.line).strip()
        return f"{Path(self.file).name}:{self.line}: {source}\n    {self.text}"


class CaptureCheck:
    """Name each line of a step that a CUDA graph or a compiled step could not contain.

    The lines are those that read a number of the device (``.item()``, ``if`` on a tensor), copy to
    the host, make a shape from data (``nonzero``, a mask as an index) or draw from Python's or
    NumPy's generators. One step is watched, the second of a ``fit``; no GPU is needed. What runs in
    a thread of the backward pass is not seen.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#constraints
    """

    def __init__(self) -> None:
        self._steps = 0
        #: Those of the watched step.
        self.reasons: list[Reason] = []

    @hookimpl
    def on_fit_start(self) -> None:
        self._steps = 0

    @hookimpl
    def on_fit_end(self, run: Run) -> None:
        if self._steps < 2 and run.world.rank == 0:
            print("capture_check: the fit had fewer than two steps, and the second is watched")

    @hookimpl(wrapper=True)
    def step(self, run: Run) -> Generator[None, Any, Any]:
        self._steps += 1
        if self._steps != 2:  # the first one also initialises
            return (yield)
        with watched() as reasons:
            result = yield
        self.reasons = list(reasons)
        if run.world.rank == 0:
            print(self._text())
        return result

    def _text(self) -> str:
        if not self.reasons:
            return "capture_check: a graph could contain this step"
        lines = "\n  ".join(map(str, self.reasons))
        return f"capture_check: a graph could not contain these lines of the step\n  {lines}"


@contextmanager
def watched() -> Iterator[Counter[Reason]]:
    """Collect the reasons in a block, with how often each comes."""
    reasons: Counter[Reason] = Counter()
    # First: the modes import torch's compiler, which draws. Under them it would give up what it is
    # to compile, also for later steps.
    eagerly = torch.compiler.set_stance("force_eager")
    before, profiler, numbers = sys.getprofile(), _Draws(reasons), _state_of_numpy()
    with eagerly, _Functions(reasons), _Operations(reasons):
        if before is None:
            sys.setprofile(profiler)
        try:
            yield reasons
        finally:
            if before is None:
                sys.setprofile(None)
            if numbers != _state_of_numpy():
                reasons[Reason("a call of numpy.random", 0, _DRAWS)] += 1


class _Functions(TorchFunctionMode):
    """Sees the methods of tensors that return no tensor, also on the CPU."""

    def __init__(self, reasons: Counter[Reason]) -> None:
        super().__init__()
        self._reasons = reasons

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        text = _METHODS.get(getattr(func, "__name__", ""))
        values = [*args, *kwargs.values()]
        if func is torch.Tensor.to and _is_host(values):
            text = _COPIES
        if func in (torch.tensor, torch.as_tensor) and not _is_tensor(values[0]):
            text = _VALUES
        if text is not None:
            _note(self._reasons, text)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operations inside of torch, by the tags that torch gives them."""

    def __init__(self, reasons: Counter[Reason]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reasons = reasons

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags or _has_mask(func, args):
            _note(self._reasons, _SHAPES)
        elif torch.Tag.data_dependent_output in func.tags:
            _note(self._reasons, _READS)
        return func(*args, **(kwargs or {}))


class _Draws:
    """A profiler of Python that sees calls of Python's generators; it sees none of NumPy's."""

    def __init__(self, reasons: Counter[Reason]) -> None:
        self._reasons = reasons

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and isinstance(getattr(argument, "__self__", None), random.Random):
            _note(self._reasons, _DRAWS)


def _state_of_numpy() -> bytes:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return b""
    _, keys, position, *_ = numpy.get_state()
    return bytes(keys.tobytes()) + bytes(str(position), "ascii")


def _is_host(values: list[Any]) -> bool:
    """True if ``Tensor.to`` names the CPU; on the CPU a device may be ``self.device``, too."""
    of_device = any(_is_tensor(value) and not value.is_cpu for value in values)
    hosts = ("cpu", torch.device("cpu")) if of_device else ("cpu",)
    return any(type(value) in (str, torch.device) and value in hosts for value in values)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _has_mask(func: Any, args: Any) -> bool:
    """True for an index with a mask, whose result has as many rows as the mask has ones."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return any(_is_tensor(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _note(reasons: Counter[Reason], text: str) -> None:
    """Count a reason at the user's innermost line, unless geartrain's code is inside of it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_of_user(frame):
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("geartrain") and name != __name__:
            return  # self.log reads no number on a GPU
        frame = frame.f_back
    if frame is not None:
        reasons[Reason(frame.f_code.co_filename, frame.f_lineno, text)] += 1
