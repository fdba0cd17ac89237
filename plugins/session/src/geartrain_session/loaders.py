"""The loaders that a Session returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from geartrain.plugin_api import close_batches, has_no_own_samples, set_epoch

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
    """

    def __init__(
        self, session_run: SessionRun, run: Run, loader: Iterable[Any], moves: bool
    ) -> None:
        self._session_run, self._run, self._loader, self._moves = session_run, run, loader, moves
        self._passes = 0

    def __iter__(self) -> Iterator[Any]:
        run, loader = self._run, self._loader
        self._session_run.begin()
        set_epoch(loader, self._passes)
        self._passes += 1
        if has_no_own_samples(loader):  # its only sample belongs to another rank
            return
        batches = (
            run.hooks.device_batches(run=run, loader=loader, stage=run.stage)
            if self._moves
            else iter(loader)
        )
        try:
            yield from batches
        finally:
            close_batches(batches, loader)

    def __len__(self) -> int:
        return 0 if has_no_own_samples(self._loader) else len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy has no attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)
