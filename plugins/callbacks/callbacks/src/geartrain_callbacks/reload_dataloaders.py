"""``reload_dataloaders``: make the loaders again in each n-th epoch of a fit.

``Trainer(reload_dataloaders_every_n_epochs=n)`` selects it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from geartrain import Run, UsageError, hookimpl
from geartrain_callbacks.fresh_start import FreshStart


class ReloadDataloaders(FreshStart):
    """Makes the loaders again before the epoch starts; a run that resumes makes the same."""

    added_for = "reload_dataloaders_every_n_epochs"

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        #: The random state of this rank when the loaders were made again.
        self._random: dict[str, Any] | None = None

    @hookimpl(wrapper=True)
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Generator[None, Any, Any]:
        source = run.loop.source
        given = [source.method(stage) for stage, data in source.given.items() if data is not None]
        if given:
            message = "reload_dataloaders_every_n_epochs makes loaders again, and these were given"
            hint = f"return them from {' and '.join(given)} of the module or a DataModule"
            raise UsageError(f"{message}. Fix: {hint}")
        return (yield)

    @hookimpl
    def on_train_start(self, run: Run) -> None:
        made = run.epoch - run.epoch % _epochs(run)
        if run.loop.resumed is not None and 0 < made < run.epoch:
            run.remake_loaders(made, _stages(run, made), self._random)

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        if run.epoch and run.epoch % _epochs(run) == 0:
            self._random = run.loop.epoch_start
            run.remake_loaders(run.epoch, _stages(run, run.epoch))

    def state_dict(self) -> dict[str, Any]:
        return {"random": self._random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random = state["random"]


def _epochs(run: Run) -> int:
    return run.plan.options.reload_dataloaders_every_n_epochs


def _stages(run: Run, epoch: int) -> tuple[str, ...]:
    """Return the stages whose loaders are made in ``epoch``.

    Those to validate are among them if a validation comes before the next ones.
    """
    every, end = run.plan.options.check_val_every_n_epoch, epoch + _epochs(run)
    validates = every is None or end // every > epoch // every
    return ("train", "validate") if validates else ("train",)
