"""torch's global CUDA settings for the length of a run.

Since 2.9 torch keeps the precision of float32 in a tree of ``fp32_precision``, where ``"none"`` takes what is set above; its older
switches write into that tree, and refuse to be read where the tree has since been changed beside them. They are used here for every torch;
what they overwrite in the tree is kept and put back, because no older switch can write ``"none"``.
https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from geartrain import UsageError

LABEL = "geartrain-cuda[cuda]"

#: option -> (read, set).
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn_benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
    "cudnn_deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    ),
    "cudnn_allow_tf32": (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
    ),
}
#: option -> what its older switch overwrites in the tree, below ``torch.backends``. cuDNN's two begin (seen in 2.13) with a
#: TF32 that gives way to what is set above them, and that nothing can set again: they get back a TF32 that does not.
_OVERWRITES = {
    "matmul_precision": ("cuda.matmul", "mkldnn.matmul"),
    "cudnn_allow_tf32": ("cudnn.conv", "cudnn.rnn"),
}
#: What stands above those, the topmost first. ``mkldnn.fp32_precision`` is left out: setting it sets the topmost one (seen in 2.13).
_ABOVE = ("", "cudnn")


class Settings:
    """Applies what was asked for, and puts back what was there.

    Args:
        wanted: option -> value; ``None`` leaves it as it is.
    """

    def __init__(self, **wanted: Any) -> None:
        self._wanted = {name: value for name, value in wanted.items() if value is not None}
        #: (option, its value, what was in the tree) of what was changed.
        self._before: list[tuple[str, Any, dict[str, str]]] = []

    def check(self) -> None:
        """Whether everything can be applied in this process.

        Raises:
            UsageError: the program has set ``fp32_precision``, and torch then refuses its older switches.
        """
        for name in self._wanted:
            self._read(name)

    def apply(self) -> None:
        """Set what is not so already.

        Raises:
            UsageError: as :meth:`check`.
        """
        for name, value in self._wanted.items():
            before = self._read(name)
            if before != value:
                self._before.append((name, before, _tree(_OVERWRITES.get(name, ()))))
                _SETTINGS[name][1](value)

    def put_back(self) -> None:
        """What :meth:`apply` changed, as far as it got."""
        while self._before:
            name, value, tree = self._before.pop()
            _SETTINGS[name][1](value)
            for path, precision in tree.items():
                _node(path).fp32_precision = precision

    def _read(self, name: str) -> Any:
        try:
            return _SETTINGS[name][0]()
        except RuntimeError as error:
            raise UsageError(
                f"{LABEL}: {name}={self._wanted[name]!r} cannot be set, because this program has set a "
                f"torch.backends...fp32_precision, and torch does not take both: {str(error).splitlines()[0]} "
                f"Fix: leave out {name}, and set fp32_precision of "
                f"{' and '.join(f'torch.backends.{path}' for path in _OVERWRITES.get(name, ()))} in the program"
            ) from error


def _node(path: str) -> Any:
    """``"cudnn.conv"`` -> ``torch.backends.cudnn.conv``, or ``None``."""
    found: Any = torch.backends
    for part in filter(None, path.split(".")):
        found = getattr(found, part, None)
    return found


def _tree(paths: tuple[str, ...]) -> dict[str, str]:
    """What these hold themselves; nothing where torch has no tree."""
    with _nothing_above():
        return {path: _node(path).fp32_precision for path in paths if _has_precision(path)}


@contextmanager
def _nothing_above() -> Iterator[None]:
    """Reading gives what holds in the end. With ``"none"`` above it is what was set there itself."""
    before: dict[str, str] = {}
    try:
        for path in filter(_has_precision, _ABOVE):
            before[path] = _node(path).fp32_precision
            if before[path] != "none":
                _node(path).fp32_precision = "none"
        yield
    finally:
        for path, precision in before.items():
            if precision != "none":
                _node(path).fp32_precision = precision


def _has_precision(path: str) -> bool:
    return hasattr(_node(path), "fp32_precision")
