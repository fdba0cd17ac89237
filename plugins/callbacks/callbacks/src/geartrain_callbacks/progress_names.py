"""PyTorch Lightning's attributes of a progress bar, for subclasses and readers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from geartrain import Run

if TYPE_CHECKING:
    from geartrain import Module, Trainer


class ProgressNames:
    """What a progress bar knows about its run; batches are those of this rank."""

    #: The running or last run.
    _run: Run | None = None
    _is_enabled = True
    #: Kept for readers: the bar is drawn at most ten times a second. 0 turns it off.
    refresh_rate = 1

    @property
    def trainer(self) -> Trainer:
        """The trainer of the running or last run."""
        return self._known_run().trainer

    @property
    def is_enabled(self) -> bool:
        """True if the bar is drawn."""
        return self._is_enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """True if the bar is not drawn."""
        return not self.is_enabled

    def enable(self) -> None:
        """Draw the bar from now on."""
        self._is_enabled = True

    def disable(self) -> None:
        """Draw the bar no more."""
        self._is_enabled = False

    @property
    def train_batch_idx(self) -> int:
        """Batches that this epoch has trained on."""
        return self._known_run().batch_idx

    @property
    def total_train_batches(self) -> int | float:
        """Batches of an epoch; infinity if the loader has no length."""
        return sum(self._batches("train"))

    @property
    def total_val_batches_current_epoch(self) -> int | float:
        """Batches of a validation, over all loaders."""
        return sum(self._batches("validate"))

    def get_metrics(self, trainer: Trainer, pl_module: Module) -> dict[str, Any]:
        """Return the metrics beside the bar: those with ``prog_bar=True``. Override it."""
        return dict(self._known_run().logs.prog_bar)

    def _batches(self, stage: str) -> list[int | float]:
        counts = self._known_run().stages[stage].batches
        return [math.inf if count is None else count for count in counts]

    def _known_run(self) -> Run:
        if self._run is None:
            raise AttributeError(f"{type(self).__name__} has not seen a run yet")
        return self._run
