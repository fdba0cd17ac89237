"""Set torch's global CUDA settings during a run.

Since 2.9 torch keeps the precision of float32 in a tree of ``fp32_precision``; a node with
``"none"`` uses the value of the node above. torch's older switches write into this tree. Reading a
switch raises an error if the program has changed the tree directly. This module uses the older
switches with every version of torch. It saves the nodes that they overwrite and restores them,
because no older switch can write ``"none"``.
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
#: option -> the nodes that its older switch overwrites, below ``torch.backends``. cuDNN's two nodes
#: start (seen in 2.13) with a TF32 that values of nodes above override. No code can set this again:
#: afterwards they have a TF32 that is not overridden.
_OVERWRITES = {
    "matmul_precision": ("cuda.matmul", "mkldnn.matmul"),
    "cudnn_allow_tf32": ("cudnn.conv", "cudnn.rnn"),
}
#: The nodes above those, the top first. Without ``mkldnn``: setting it sets the top (seen in 2.13).
_ABOVE = ("", "cudnn")


class Settings:
    """Applies settings and restores the previous values.

    Args:
        wanted: option -> value; ``None`` keeps torch's setting.
    """

    def __init__(self, **wanted: Any) -> None:
        self._wanted = {name: value for name, value in wanted.items() if value is not None}
        #: The previous values: (option, value, path of a node -> its precision).
        self._before: list[tuple[str, Any, dict[str, str]]] = []

    def check(self) -> None:
        """Check that every setting can be applied in this process.

        Raises:
            UsageError: the program has set ``fp32_precision``, so torch refuses its older switches.
        """
        for name in self._wanted:
            self._read(name)

    def apply(self) -> None:
        """Apply the settings that differ from torch's.

        Raises:
            UsageError: as :meth:`check`.
        """
        for name, value in self._wanted.items():
            before = self._read(name)
            if before != value:
                self._before.append((name, before, _tree(_OVERWRITES.get(name, ()))))
                _SETTINGS[name][1](value)

    def put_back(self) -> None:
        """Restore the settings that :meth:`apply` changed, also if it failed."""
        while self._before:
            name, value, tree = self._before.pop()
            _SETTINGS[name][1](value)
            for path, precision in tree.items():
                _node(path).fp32_precision = precision

    def _read(self, name: str) -> Any:
        try:
            return _SETTINGS[name][0]()
        except RuntimeError as error:
            nodes = " and ".join(f"torch.backends.{path}" for path in _OVERWRITES.get(name, ()))
            raise UsageError(
                f"{LABEL}: {name}={self._wanted[name]!r} cannot be set, because this program has "
                "set a torch.backends...fp32_precision, and torch does not accept both: "
                f"{str(error).splitlines()[0]} "
                f"Fix: leave out {name}, and set fp32_precision of {nodes} in the program"
            ) from error


def _node(path: str) -> Any:
    """Return ``torch.backends.cudnn.conv`` for ``"cudnn.conv"``, or ``None``."""
    found: Any = torch.backends
    for part in filter(None, path.split(".")):
        found = getattr(found, part, None)
    return found


def _tree(paths: tuple[str, ...]) -> dict[str, str]:
    """Return the precision of each node itself; an empty dictionary if torch has no tree."""
    with _nothing_above():
        return {path: _node(path).fp32_precision for path in paths if _has_precision(path)}


@contextmanager
def _nothing_above() -> Iterator[None]:
    """Set the nodes above to ``"none"``: then reading a node returns its own value."""
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
