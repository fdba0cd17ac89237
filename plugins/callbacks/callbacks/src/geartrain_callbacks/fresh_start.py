"""The base class of plugins whose state belongs to one ``fit``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

import torch

from geartrain import Run, hookimpl


class FreshStart(ABC):
    """Forgets earlier fits when a ``fit`` is set up; a checkpoint to resume from is loaded later.

    The object may come from another Trainer, or with its state from another process.
    """

    @hookimpl(wrapper=True)
    def setup_device(self, run: Run) -> Generator[None, torch.device, torch.device]:
        if run.command == "fit":
            self.forget()
        return (yield)

    @abstractmethod
    def forget(self) -> None:
        """Set the state that ``load_state_dict`` restores to that of a new object."""
