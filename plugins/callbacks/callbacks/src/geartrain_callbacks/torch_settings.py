"""``deterministic`` and ``detect_anomaly``: settings of torch during a run.

``Trainer(deterministic=..., detect_anomaly=True)`` selects them.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from geartrain import Run, hookimpl


class _Setting:
    """Enters a context before a process sets up its device, and leaves it at the very end."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def context(self, run: Run) -> AbstractContextManager[Any]:
        """Return the context."""
        raise NotImplementedError

    @hookimpl(wrapper=True)
    def setup_device(self, run: Run) -> Generator[None, torch.device, torch.device]:
        self._stack.enter_context(self.context(run))
        return (yield)

    @hookimpl(wrapper=True)
    def teardown_device(self) -> Generator[None, Any, Any]:
        with self._stack:
            return (yield)


class DetectAnomaly(_Setting):
    """Stops in the backward pass that makes a NaN, and shows its forward call."""

    added_for = "detect_anomaly"

    def context(self, run: Run) -> AbstractContextManager[Any]:
        return torch.autograd.detect_anomaly()


class Deterministic(_Setting):
    """Lets torch use deterministic algorithms; with ``"warn"`` it only warns of others."""

    added_for = "deterministic"

    def context(self, run: Run) -> AbstractContextManager[Any]:
        return _determinism(warn_only=run.plan.options.deterministic == "warn")


@contextmanager
def _determinism(warn_only: bool) -> Generator[None, None, None]:
    """Ask torch for deterministic algorithms in the block.

    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    # cuBLAS reads this when its first handle is made; without it deterministic mode raises on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
