"""The loaders that a Session returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from geartrain import TrainingError
from geartrain.plugin_api import close_batches

if TYPE_CHECKING:
    from geartrain import Run
    from geartrain_session.session_run import SessionRun


class SessionLoader:
    """A loader of this rank's batches, on its device; each pass is the next epoch.

    Args:
        session_run: the run of the session.
        run: a copy of the session's run, with only this loader.
        loader: the loader of this rank.
        moves: true if batches move to the device.
        counts: each rank's number of batches, by rank; empty if they are equal or not known.
    """

    def __init__(
        self,
        session_run: SessionRun,
        run: Run,
        loader: Iterable[Any],
        moves: bool,
        counts: Sequence[int] = (),
    ) -> None:
        self._session_run, self._run, self._loader, self._moves = session_run, run, loader, moves
        self._counts, self._passes = counts, 0

    def __iter__(self) -> Iterator[Any]:
        run, loader = self._run, self._loader
        self._session_run.begin()
        run.current_stage.set_epoch(self._passes)
        self._passes += 1
        if self._is_empty:  # its only sample belongs to another rank
            return
        batches = (
            run.hooks.device_batches(run=run, loader=loader, stage=run.stage)
            if self._moves
            else iter(loader)
        )
        shortest, before = min(self._counts, default=None), self._session_run.backwards
        try:
            for i, batch in enumerate(batches):
                if i == shortest and self._session_run.backwards > before:
                    raise self._uneven(i)
                yield batch
        finally:
            close_batches(batches, loader)

    @property
    def _is_empty(self) -> bool:
        return self._run.current_stage.batches == [0]

    def _uneven(self, shortest: int) -> TrainingError:
        ranks = [rank for rank, count in enumerate(self._counts) if count == shortest]
        return TrainingError(
            f"the ranks have {list(self._counts)} batches of this loader: ranks {ranks} have no "
            f"batch after the first {shortest}, and the others would wait for their gradients. "
            "Fix: to train, leave out even=False in setup_dataloaders, or end the loop of every "
            f"rank after {shortest} batches"
        )

    def __len__(self) -> int:
        return 0 if self._is_empty else len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy has no attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)
