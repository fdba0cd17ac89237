"""``remote``: keep the folder of a run in a remote store too, and resume from there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import ClusterEnvironment, detect, warn
from geartrain_resilience.remote.store import Progress, Store, check_url, progress, tail
from geartrain_resilience.remote.uploads import STAGED, SUFFIX, Uploads, files_in, stamp

_LABEL = "geartrain-resilience[remote]"


class Remote:
    """Upload the run's folder to a store while it trains, and resume from the store.

    After each checkpoint, and at the end, rank 0 uploads the files that have changed, in the
    background. A save waits until the files of the save before it are in the store, so at most one
    is behind. When ``fit`` returns, everything is there, also after an error or Ctrl-C; of a run
    that fails before its first checkpoint there is nothing.

    If a run resumes from ``"last"`` or ``"auto"`` and the store has a checkpoint that is further
    than those of this machine, the files are downloaded first.

    Args:
        url: of a folder of a store that fsspec knows, for this run alone: ``s3://bucket/runs/7``.

    Raises:
        UsageError: it cannot be used.
    """

    def __init__(self, url: str) -> None:
        self.url = check_url(url, f"{_LABEL}: url")
        self._uploads: Uploads | None = None
        #: True once this object has looked for checkpoints in the store, or has begun a run there.
        self._looked = self._began = False
        place = detect()
        self._nodes = 1 if place is None else place.nodes
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_uploads": None}

    # --- before the run ---------------------------------------------------------------------------

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        self._nodes = plan.num_nodes
        if plan.output is None and not plan.options.fast_dev_run:
            raise UsageError(
                f"{_LABEL} uploads the run's folder, and it has none. Fix: --output DIR"
            )
        if sum(choice.label == _LABEL for choice in plan.plugins) > 1:
            raise UsageError(f"{_LABEL} is given twice. Fix: give one, for one store")

    @hookimpl(wrapper=True)  # first: the files are there when other plugins look for them
    def find_checkpoint(
        self, which: str, output: Path | None
    ) -> Generator[None, list[Any], list[Any]]:
        chosen = None
        if not (self._looked or output is None):
            self._looked, chosen = True, self._restore(output)
        return [*(yield), [] if chosen is None or which != "last" else [chosen]]

    @hookimpl(wrapper=True)
    def launch(self, run: Run) -> Generator[None, Any, Any]:
        resumes = run.plan.resumes or self._began
        if run.output and ClusterEnvironment.starts_rank_0(detect(), run.plan.num_nodes):
            found = Store(self.url).files()  # an error before anything starts
            if not resumes and any(name.endswith((SUFFIX, "plan.json")) for name in found):
                raise UsageError(
                    f"{self.url} already contains a run, which geartrain does not overwrite. "
                    "Fix: use another URL, or resume its run with ckpt_path='auto', on the command "
                    "line with --resume auto"
                )
        self._began = self._looked = True
        return (yield)

    def _restore(self, folder: Path) -> Path | None:
        """Download the run if the store is further; return the checkpoint if all nodes must use it.

        On several nodes the store decides, because each node sees only its own files.
        """
        store = Store(self.url)
        if not self._wanted(store, folder):
            return None
        (folder / STAGED).mkdir(parents=True, exist_ok=True)
        with FileLock(folder / STAGED / "lock"):
            # Again: another process of this node may have been faster.
            names = self._wanted(store, folder)
            if not all(names.values()):
                for name in sorted(store.files().keys() - names.keys()):
                    store.get(name, folder / name)
            # The furthest last: the newest file is that from which the run resumes, and a kill
            # before it is complete leaves a folder that is restored again.
            for name, same in names.items():
                if not same:
                    store.get(name, folder / name)
        lasts = [name for name in names if Path(name).stem.partition("-")[0] == "last"]
        if self._nodes == 1 or not names:
            return None
        chosen = folder / (lasts or list(names))[-1]
        os.utime(chosen)
        return chosen

    def _wanted(self, store: Store, folder: Path) -> dict[str, bool]:
        """Return the checkpoints of the store if it decides, the furthest last.

        Returns:
            Name -> True if the folder has the same file.
        """
        ends = store.tails({n: s for n, s in store.files().items() if n.endswith(SUFFIX)})
        local = {n: tail(path) for n, path in files_in(folder).items() if n.endswith(SUFFIX)}
        if not ends or (self._nodes == 1 and _furthest(ends.values()) <= _furthest(local.values())):
            return {}
        ordered = sorted(ends, key=lambda name: _furthest([ends[name]]))
        return {name: local.get(name) == ends[name] for name in ordered}

    # --- on each rank -----------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def load_checkpoint(self, run: Run) -> Generator[None, Any, Any]:
        state = yield
        if run.world.size > 1:  # each node read a file of its own
            fit = state.get("fit") or {} if isinstance(state, dict) else {}
            place = [float(fit.get(key, -1)) for key in ("epoch", "step", "batch_idx")]
            values = torch.tensor(place, dtype=torch.float64)
            places = run.hooks.log_sync(run=run, values=values).tolist()
            if any(each != places[0] for each in places):
                steps = ", ".join(str(int(each[1])) for each in places)
                raise TrainingError(
                    f"{_LABEL}: the ranks read checkpoints of other steps: {steps}. Fix: remove "
                    "the run's folder on all nodes, so that all resume from the store"
                )
        return state

    @hookimpl(wrapper=True)
    def on_run_start(self, run: Run) -> Generator[None, Any, Any]:
        self._uploads = None
        if run.world.rank == 0 and run.output is not None:
            shutil.rmtree(run.output / STAGED, ignore_errors=True)  # of a killed process
            known, stored = self._same(run.output)
            self._uploads = Uploads(self.url, run.output, known, stored)
        return (yield)

    def _same(self, folder: Path) -> tuple[dict[str, object], set[str]]:
        """Return stamps of the checkpoints that both have, and the names of those in the store."""
        store, local = Store(self.url), files_in(folder)
        found = {n: size for n, size in store.files().items() if n.endswith(SUFFIX)}
        equal = {n: s for n, s in found.items() if n in local and local[n].stat().st_size == s}
        ends = store.tails(equal)
        same = {n: stamp(local[n]) for n in equal if ends[n] == tail(local[n])}
        return same, set(found)

    @hookimpl
    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        if self._uploads is None or run.output is None:
            return
        if not path.absolute().is_relative_to(run.output.absolute()):
            if not self._warned:
                message = f"{_LABEL} uploads the run's folder {run.output}, and not {path}"
                warn(f"{message}. Fix: save it in that folder")
            self._warned = True
            return
        self._uploads.start()

    @hookimpl(wrapper=True)  # after the others, which write the last of their files here
    def on_run_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if self._uploads is not None:
            self._uploads.finish()
        return results

    @hookimpl(wrapper=True)
    def on_exception(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            if self._uploads is not None:
                self._uploads.finish(only_after_checkpoint=True)


def _furthest(ends: Iterable[bytes]) -> Progress:
    """Return the furthest progress of files by their last bytes; -1 if none has any."""
    return max((progress(end) or (-1, -1, -1) for end in ends), default=(-1, -1, -1))
