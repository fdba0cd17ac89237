"""The plugin ``wandb``."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from geartrain import UsageError, hookimpl
from geartrain.plugin_api import experiment, user_path, warn
from geartrain_wandb import session

if TYPE_CHECKING:
    import wandb

    from geartrain import Plan, Run
    from geartrain.callbacks import Media

#: The axis of every chart. wandb's own step counts records, so training and validation metrics of
#: the same optimizer step are both kept.
STEP = "trainer/global_step"
#: The exit codes that wandb's own exit hook sends to the server.
_EXIT_CODES = {"done": 0, "failed": 1, "interrupted": 255}
_SETTINGS = {"name": "run_name", "group": "run_group", "tags": "run_tags", "notes": "run_notes"}
_MODES = ("online", "offline", "disabled")


class WandB:
    """Send metrics, configuration and, if requested, checkpoints to Weights & Biases, on rank 0.

    Each fit, validate, test or predict is one wandb run. If the script has called ``wandb.init()``,
    its run is used and not ended. Options left out have wandb's values: from ``WANDB_PROJECT``,
    ``WANDB_MODE`` etc., then from its settings files.

    Args:
        project: the project of the run.
        name: the run's name; by default wandb makes one up.
        entity: the user or team that owns the run.
        group: the group of runs.
        tags: tags to find the run by.
        notes: a longer text.
        mode: ``"online"``; ``"offline"``: keep the run on this machine, for ``wandb sync``;
            ``"disabled"``: do nothing.
        folder: wandb writes to ``folder/wandb``. Default: ``WANDB_DIR``, then the run's folder,
            then the working folder.
        checkpoints: upload every checkpoint as an artifact of type ``model``.

    Raises:
        UsageError: an option is wrong.
    """

    errors_are_warnings = True

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        folder: str | Path | None = None,
        checkpoints: bool = False,
    ) -> None:
        if mode is not None and mode not in _MODES:
            raise UsageError(
                f"{session.LABEL}: mode={mode!r} is not known. Fix: use one of {', '.join(_MODES)}"
            )
        if isinstance(tags, str):
            raise UsageError(f"{session.LABEL}: tags={tags!r} is one string. Fix: tags=[{tags!r}]")
        self._folder = None if folder is None else user_path(folder, f"{session.LABEL}: folder")
        if self._folder is not None and self._folder.exists() and not self._folder.is_dir():
            raise UsageError(
                f"{session.LABEL}: folder={str(folder)!r} is a file. Fix: use another name"
            )
        options = {
            "project": project,
            "name": name,
            "entity": entity,
            "group": group,
            "tags": tags,
            "notes": notes,
            "mode": mode,
        }
        self._given = {option: value for option, value in options.items() if value is not None}
        #: The names in wandb.Settings.
        self._settings = {
            _SETTINGS.get(option, option): value for option, value in self._given.items()
        }
        self._checkpoints = checkpoints
        self._run: wandb.Run | None = None
        self._running = False
        self._borrowed = False
        self._uploaded = 0

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if (
            not plan.options.fast_dev_run
            and os.environ.get("RANK", "0") == "0"
            and session.existing() is None
        ):
            session.check(self._settings)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._running = True
        if run.world.rank != 0 or run.plan.options.fast_dev_run:
            return
        config, existing = _config(run), session.existing()
        self._borrowed, self._uploaded = existing is not None, 0
        if existing is not None:
            self._run = existing
            existing.config.update(config, allow_val_change=True)  # type: ignore[no-untyped-call]
            unused = f"; not used: {', '.join(sorted(self._given))}" if self._given else ""
            _warn(
                f"wandb: the script's own run {existing.name or existing.id} is used, "
                f"and stays open{unused}"
            )
        else:
            self._run = session.begin(
                self._settings, config=config, job_type=run.command, dir=self._where(run)
            )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)

    @hookimpl
    def log_metrics(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._run is not None:
            self._run.log({STEP: step, "epoch": run.epoch, **metrics})

    @hookimpl
    def log_media(self, run: Run, media: Media) -> None:
        if self._run is None:
            return
        wandb, value = session.load(), media.value
        if media.kind == "image":
            import PIL.Image

            converted = wandb.Image(PIL.Image.open(io.BytesIO(media.encoded()[1])))
        elif media.kind == "histogram":
            converted = wandb.Histogram(np_histogram=(value.counts, value.edges))
        elif media.kind == "table":
            converted = wandb.Table(columns=value.columns, data=value.rows)
        else:
            converted = wandb.Html(f"<pre>{html.escape(value)}</pre>", inject=False)
        self._run.log({STEP: media.step, "epoch": run.epoch, media.name: converted})

    @property
    def experiment(self) -> wandb.Run:
        """wandb's own run; on other ranks an object that does nothing.

        Raises:
            TrainingError: no run is under way.
        """
        experiment_run: wandb.Run = experiment(self._run, self._running, session.LABEL)
        return experiment_run

    @hookimpl
    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        if self._run is None or not self._checkpoints:
            return
        facts = {"step": run.step, "epoch": run.epoch}
        artifact = session.load().Artifact(f"model-{self._run.id}", type="model", metadata=facts)
        # wandb copies the file, because the next checkpoint may overwrite it before the upload.
        artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
        self._run.log_artifact(artifact, aliases=["latest"])
        self._uploaded += 1

    @hookimpl
    def on_run_end(self) -> None:
        if self._run is not None and self._checkpoints and not self._uploaded:
            _warn("wandb: checkpoints=True, but the run saved none. Fix: --output DIR")
        self._end({"status": "done"})

    @hookimpl
    def on_exception(self, error: BaseException) -> None:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._end({"status": status, "error": f"{type(error).__name__}: {error}"})

    def _where(self, run: Run) -> str | None:
        if self._folder is None and (run.output is None or "WANDB_DIR" in os.environ):
            return None
        chosen = self._folder if self._folder is not None else run.output
        folder = Path(chosen)  # type: ignore[arg-type]
        folder.mkdir(parents=True, exist_ok=True)  # if it is missing, wandb uses a temporary folder
        return str(folder)

    def _end(self, outcome: Mapping[str, str]) -> None:
        """End the run, unless it is the script's, even if wandb fails or after an error."""
        run, self._run, self._running = self._run, None, False
        if run is None:
            return
        try:
            run.summary.update({f"geartrain/{name}": value for name, value in outcome.items()})
        finally:
            if not self._borrowed:
                session.end(run, _EXIT_CODES[outcome["status"]])


def _config(run: Run) -> dict[str, Any]:
    """Return the hyperparameters, for comparing and sorting, and the plan under ``geartrain``."""
    plan = run.plan.as_dict()
    return {**plan.pop("hyperparameters"), "geartrain": {"command": run.command, **plan}}


def _warn(text: str) -> None:
    warn(text)
