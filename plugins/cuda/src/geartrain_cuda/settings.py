"""torch's global CUDA settings for the length of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: option -> (read, set).
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn_benchmark": (lambda: torch.backends.cudnn.benchmark, lambda value: setattr(torch.backends.cudnn, "benchmark", value)),
    "cudnn_deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    ),
    "cudnn_allow_tf32": (lambda: torch.backends.cudnn.allow_tf32, lambda value: setattr(torch.backends.cudnn, "allow_tf32", value)),
}


class Settings:
    """Applies what was asked for, and puts back what was there.

    Args:
        wanted: option -> value; ``None`` leaves it as it is.
    """

    def __init__(self, **wanted: Any) -> None:
        self._wanted = {name: value for name, value in wanted.items() if value is not None}
        self._before: dict[str, Any] = {}

    def apply(self) -> None:
        for name, value in self._wanted.items():
            read, write = _SETTINGS[name]
            self._before[name] = read()
            write(value)

    def put_back(self) -> None:
        """What :meth:`apply` changed, as far as it got."""
        while self._before:
            name, value = self._before.popitem()
            _SETTINGS[name][1](value)
