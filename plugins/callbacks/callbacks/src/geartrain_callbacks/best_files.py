"""The best files by a metric: which exist, and which the next one replaces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geartrain.plugin_api import warn
from geartrain_callbacks.own_files import check_name, is_own


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of rank 0; every rank carries it out. File names are relative to the folder."""

    #: The file of the newest checkpoint; empty if it is not among the best.
    name: str = ""
    score: float | None = None
    #: The file that the new one replaces.
    drop: str = ""
    last: str = ""
    #: The warning if the metric is missing but may still be logged.
    missing: str = ""
    #: The error if the metric is missing and should have been logged.
    error: str = ""
    #: True if the metric has no value for these weights yet. The next validation or end of an
    #: epoch that logs one is used instead.
    retries: bool = False


class BestFiles:
    """The best files, their scores and the newest ``last.ckpt``; names are relative to a folder.

    Args:
        mode: ``"min"`` or ``"max"``.
        save_top_k: how many to keep; -1 keeps all.
        planned: the folder that the next fit writes to, if it is known.
    """

    def __init__(self, mode: str, save_top_k: int, planned: Path | None) -> None:
        self.mode, self.save_top_k = mode, save_top_k
        #: The file in the folder that this fit resumed from; the same if it is to stay for good.
        self._source = self._chosen = ""
        #: The run's folder when the state was saved; only compared, never opened.
        self._output = ""
        #: The folder that the next fit writes to, and the folder of the named files.
        self._planned = self._where = planned
        self.forget()

    def forget(self) -> None:
        #: The score of the best file.
        self.best_model_score: float | None = None
        #: A random id, drawn at a start from scratch. It marks the files that this object wrote.
        self._identity = ""
        # Names are relative to the folder, so that a copy of the folder is complete.
        self._best = self._last = ""
        self._scores: dict[str, float] = {}
        #: Files that the file being saved replaces, and the source if it was replaced.
        self._old: list[str] = []

    @property
    def best_model_path(self) -> str:
        """The best file so far; without ``monitor`` the newest; empty if none exists."""
        return self._path(self._best)

    @property
    def last_model_path(self) -> str:
        """The newest ``last.ckpt``; empty without ``save_last``."""
        return self._path(self._last)

    @property
    def best_k_models(self) -> dict[str, float]:
        """The scores of the best files, oldest file first."""
        return {self._path(name): score for name, score in self._scores.items()}

    @property
    def kth_best_model_path(self) -> str:
        """The file that the next better one replaces; empty if fewer than ``save_top_k`` exist."""
        return self._path(self._kth_best())

    def _drop_lost(self, folder: Path) -> None:
        """Forget files that no longer exist or that another run wrote."""
        names = dict.fromkeys(name for name in (self._best, self._last, *self._scores) if name)
        # The others of save_top_k=-1 are never deleted: do not read each of them.
        read = [name for name in names if self.save_top_k != -1 or name not in self._scores]
        read += [self._best] if self._best and self._best not in read else []
        lost = [name for name in names if name not in read and not (folder / name).exists()]
        lost += [name for name in read if not is_own(folder, name, self._identity)]
        if not lost:
            return
        warn(
            f"geartrain-callbacks[model_checkpoint]: {folder} no longer has {', '.join(lost)} "
            "of this run: removed from the list of the best"
        )
        self._scores = {name: score for name, score in self._scores.items() if name not in lost}
        self._last = "" if self._last in lost else self._last
        if self._best in lost:
            self._best = next(iter(self._ranked()), "")
            self.best_model_score = self._scores.get(self._best)

    def _remember(self, turn: Decision) -> None:
        """Note the next file and the files that it replaces."""
        self._old += [
            name
            for name, new in ((turn.drop, turn.name), (self._last, turn.last))
            if new and name not in ("", new, self._chosen)
        ]
        self._last = turn.last or self._last
        if turn.name:
            self._scores.pop(turn.drop, None)
            if turn.score is None:
                self._best = turn.name
            else:
                self._scores.pop(turn.name, None)
                self._scores[turn.name] = turn.score
                self._best = next(iter(self._ranked()), "")
                self.best_model_score = self._scores.get(self._best)

    def _kth_best(self) -> str:
        ranked = self._ranked()
        return ranked[-1] if 0 < self.save_top_k <= len(ranked) else ""

    def _ranked(self) -> list[str]:
        """Return the files with a score, best first; of equal scores the older first."""
        scored = {name: score for name, score in self._scores.items() if not math.isnan(score)}
        return sorted(
            scored, key=lambda name: scored[name] if self.mode == "min" else -scored[name]
        )

    def _path(self, name: str) -> str:
        folder = self._where or self._planned
        return str(folder / name) if name and folder is not None else ""

    def state_dict(self) -> dict[str, Any]:
        return {
            "identity": self._identity,
            "output": self._output,
            "best_model_path": self._best,
            "best_model_score": self.best_model_score,
            "last_model_path": self._last,
            "best_k_models": dict(self._scores),
            "replaced": list(self._old),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these files.

        Raises:
            ValueError: a name leads out of the folder.
        """
        if state == self.state_dict():
            return
        best, last = (
            name and check_name(name)
            for name in (state["best_model_path"], state["last_model_path"])
        )
        scores = {check_name(name): float(score) for name, score in state["best_k_models"].items()}
        old = [check_name(name) for name in state["replaced"]]
        self._identity = str(state["identity"])
        self._output = str(state["output"])
        self.best_model_score = state["best_model_score"]
        self._best, self._last, self._scores, self._old = best, last, scores, old
        self._where = self._planned  # a fit in another process wrote its files to that folder
