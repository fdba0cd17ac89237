"""The plugin ``tensorboard``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain import UsageError, hookimpl
from geartrain.plugin_api import experiment, user_path, warn
from geartrain_tensorboard.graph import trace
from geartrain_tensorboard.hparams import session_end, session_start
from geartrain_tensorboard.media import image, markdown

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from geartrain import Plan, Run
    from geartrain.callbacks import Media


_FILES = "events.out.tfevents.*"


class TensorBoard:
    """Write TensorBoard's event files, on rank 0.

    Each metric is a scalar with its name, at the optimizer step of its logging. The plan is a text.
    Its hyperparameters are TensorBoard's, in the same folder as the scalars: the HPARAMS table
    shows them with the newest value of each metric.

    Args:
        folder: the folder of the files; default ``tensorboard`` in the run's folder. If it already
            has files, a fit creates ``fit-2``, ``fit-3`` and so on in it, and an evaluation adds to
            the newest of these.
        graph: also write the module's graph; this calls ``forward`` once with its
            ``example_input_array``.
        flush_seconds: seconds between writes to disk.

    Raises:
        UsageError: neither ``folder`` nor the run's folder exists, ``folder`` is a file, or
            ``flush_seconds`` is not above 0.
    """

    errors_are_warnings = True

    def __init__(
        self, folder: str | None = None, graph: bool = False, flush_seconds: float = 30.0
    ) -> None:
        if (
            isinstance(flush_seconds, bool)
            or not isinstance(flush_seconds, int | float)
            or not flush_seconds > 0
        ):
            raise UsageError(
                f"geartrain-tensorboard[tensorboard]: flush_seconds={flush_seconds!r} is not a "
                "number of seconds above 0. Fix: leave it out (30.0)"
            )
        self.folder = (
            None
            if folder is None
            else user_path(folder, "geartrain-tensorboard[tensorboard]: folder")
        )
        self.graph, self.flush_seconds = graph, flush_seconds
        self._writer: SummaryWriter | None = None
        self._running = False

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if plan.options.fast_dev_run:
            return
        folder = self._base(plan)
        if folder is None:
            raise UsageError(
                "geartrain-tensorboard[tensorboard] has no place to write. "
                "Fix: --tensorboard.folder DIR, or a folder for the run (--output DIR)"
            )
        if folder.exists() and not folder.is_dir():
            raise UsageError(
                f"geartrain-tensorboard[tensorboard]: {str(folder)!r} is not a folder. "
                "Fix: use another --tensorboard.folder"
            )

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._close()
        self._running, base = True, self._base(run.plan)
        if run.world.rank != 0 or base is None or run.plan.options.fast_dev_run:
            return
        from torch.utils.tensorboard import SummaryWriter

        memory, store = run.loop.memory_checkpoint, run.store
        folder = place(base, run.command, memory is not None)
        if store is not None:
            # A rank that has died goes on in its own folder, also if it has no state yet.
            number = [part.plugin for part in run.hooks.parts].index(self)
            folder = Path(store.compare_set(f"tensorboard {number}", "", str(folder)).decode())
        step = None if memory is None else memory["step"] + 1
        self._writer = SummaryWriter(str(folder), purge_step=step, flush_secs=self.flush_seconds)
        if run.command == "fit" and memory is None:
            text = json.dumps(run.plan.as_dict(), indent=2)
            self._writer.add_text("plan", f"```json\n{text}\n```", run.step)
            self._add(session_start(run.plan.hyperparameters))
            if self.graph:
                self._add_graph(run, self._writer)
            self._writer.flush()

    @hookimpl
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    @hookimpl
    def log_media(self, media: Media) -> None:
        if self._writer is None:
            return
        name, value, step = media.name, media.value, media.step
        if media.kind == "image":
            self._add(image(media), step)
        elif media.kind == "histogram":
            self._writer.add_histogram_raw(
                name,
                *(value.edges[0], value.edges[-1], sum(value.counts), value.sum, value.sum_squares),
                *(value.edges[1:], value.counts, step),
            )
        else:
            self._writer.add_text(name, value if media.kind == "text" else markdown(value), step)

    def appended_files(self) -> list[Path]:
        """Write all points to disk, and return the files.

        The strategy ``elastic`` cuts them to these sizes if the rank dies and starts again.
        """
        if self._writer is None:
            return []
        self._writer.flush()
        return sorted(Path(self._writer.log_dir).glob(_FILES))

    @property
    def experiment(self) -> SummaryWriter:
        """torch's ``SummaryWriter`` of the run; on other ranks an object that does nothing.

        Raises:
            TrainingError: no run is under way.
        """
        label = "geartrain-tensorboard[tensorboard]"
        writer: SummaryWriter = experiment(self._writer, self._running, label)
        return writer

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        self._end(run, succeeded=True)

    @hookimpl
    def on_exception(self, run: Run) -> None:
        self._end(run, succeeded=False)

    def _base(self, plan: Plan) -> Path | None:
        if self.folder is not None:
            return self.folder
        return None if plan.output is None else plan.output / "tensorboard"

    def _add(self, summary: Any, step: int | None = None) -> None:
        assert self._writer is not None
        self._writer._get_file_writer().add_summary(summary, step)  # type: ignore[no-untyped-call]

    def _add_graph(self, run: Run, writer: SummaryWriter) -> None:
        try:
            trace(run, writer)
        except Exception as error:
            warn(
                "geartrain-tensorboard[tensorboard]: no graph was written of "
                f"{type(run.module).__name__}: {type(error).__name__}: {error}"
            )

    def _end(self, run: Run, succeeded: bool) -> None:
        try:
            if self._writer is not None and run.command == "fit":
                self._add(session_end(succeeded))
        finally:
            self._close()

    def _close(self) -> None:
        writer, self._writer, self._running = self._writer, None, False
        if writer is not None:
            writer.close()


def place(base: Path, command: str, goes_on: bool = False) -> Path:
    """Return the folder for a run.

    Each fit has its own folder, because TensorBoard shows all files of a folder as one curve. An
    evaluation uses the folder of the newest fit, and so does a fit that goes on.
    """
    newest, number = base, 2
    while (following := base / f"fit-{number}").is_dir():
        newest, number = following, number + 1
    is_new = command == "fit" and not goes_on and any(newest.glob(_FILES))
    return following if is_new else newest
