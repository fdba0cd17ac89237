"""The plugin ``mlflow``."""

from __future__ import annotations

import getpass
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from geartrain import UsageError, __version__, hookimpl
from geartrain.plugin_api import experiment
from geartrain_mlflow.names import Names
from geartrain_mlflow.params import params
from geartrain_mlflow.upload import Upload

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from geartrain import Plan, Run
    from geartrain.callbacks import Media

_LABEL = "geartrain-mlflow[mlflow]"
#: Params per call. MLflow takes 100, but at most 1 MB: 20 of the longest have 0.7 MB when escaped.
_PARAMS = 20


class MLflow:
    """Record each fit and each evaluation as a run of MLflow, on rank 0.

    Hyperparameters and the plan are its params; logged values are its metrics, with their optimizer
    step. A thread talks to MLflow, so training waits for it only at the end. After MLflow's first
    error the plugin warns and records nothing more; training continues.

    Args:
        experiment: its name; created if it does not exist. Default ``MLFLOW_EXPERIMENT_NAME``,
            ``MLFLOW_EXPERIMENT_ID`` or ``Default``.
        run_name: default the name of the run's folder, or a name that MLflow makes up.
        tracking_uri: a server or a database; default ``MLFLOW_TRACKING_URI``, or MLflow's default
            ``sqlite:///mlflow.db``.
        tags: tags of the run, in addition to its user and source.
        checkpoints: also send each saved checkpoint as an artifact.
        patience: seconds that the end of a run waits until MLflow has received the rest.

    Raises:
        UsageError: a name is empty, ``patience`` is not above 0, or ``tracking_uri`` is a folder,
            which MLflow refuses.
    """

    errors_are_warnings = True

    def __init__(
        self,
        experiment: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, str] | None = None,
        checkpoints: bool = False,
        patience: float = 30.0,
    ) -> None:
        for name, value in (
            ("experiment", experiment),
            ("run_name", run_name),
            ("tracking_uri", tracking_uri),
        ):
            if value is not None and not value.strip():
                raise UsageError(
                    f"{_LABEL}: {name}={value!r} is empty. Fix: leave it out, or a name"
                )
        if isinstance(patience, bool) or not isinstance(patience, int | float) or not patience > 0:
            raise UsageError(
                f"{_LABEL}: patience={patience!r} is not a number of seconds above 0. "
                "Fix: leave it out (30.0)"
            )
        self.experiment_name, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri
        self.tags, self.checkpoints, self.patience = dict(tags or {}), checkpoints, patience
        self._upload: Upload | None = None
        self._names, self._running = Names(), False

    @hookimpl
    def check_plan(self) -> None:
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        allowed = os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
        if urlsplit(uri).scheme in ("", "file") and not allowed:
            raise UsageError(
                f"{_LABEL}: tracking_uri={uri!r} is a folder, and MLflow no longer writes into "
                "folders. Fix: sqlite:///mlflow.db, a server's http://HOST:PORT, "
                "or MLFLOW_ALLOW_FILE_STORE=true"
            )

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._upload, self._names, self._running = None, Names(), True
        if run.world.rank != 0 or run.plan.options.fast_dev_run:
            return
        # Not in the thread: a DataLoader worker forked during the import would hang on its lock.
        import mlflow  # noqa: F401

        plan, command = run.plan, run.command
        self._upload = Upload(lambda: self._begin(plan, command))

    @hookimpl
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self._upload is not None:
            from mlflow.entities import Metric

            current = int(time.time() * 1000)
            self._upload.add(
                metrics=[
                    Metric(self._names[name], value, current, step)
                    for name, value in metrics.items()
                ]
            )

    @hookimpl
    def log_media(self, media: Media) -> None:
        if self._upload is not None:
            suffix, data = media.encoded()
            name = f"{self._names[media.name]}/{media.step:08}{suffix}"
            self._upload.add(media=[(name, data)])

    @property
    def experiment(self) -> MlflowClient:
        """The client that writes the run ``run_id``; on other ranks an object that does nothing.

        It waits until MLflow has created the run.

        Raises:
            TrainingError: no run is under way, or MLflow did not answer within ``patience``.
        """
        begun = self._upload and self._upload.begun(self.patience)
        client: MlflowClient = experiment(begun and begun[0], self._running, _LABEL)
        return client

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; ``None`` outside a run and on other ranks. Waits as above."""
        return None if self._upload is None else self._upload.begun(self.patience)[1]

    @hookimpl
    def on_checkpoint_saved(self, path: Path) -> None:
        if self._upload is not None and self.checkpoints:
            self._upload.add(files=[str(path)])

    @hookimpl
    def on_run_end(self) -> None:
        self._finish("FINISHED")

    @hookimpl
    def on_exception(self, error: BaseException) -> None:
        # Ctrl-C and sys.exit are not Exceptions.
        self._finish("FAILED" if isinstance(error, Exception) else "KILLED")

    def _finish(self, status: str) -> None:
        upload, self._upload, self._running = self._upload, None, False
        if upload is not None:
            upload.finish(status, self.patience)

    # --- in the thread ---------------------------------------------------------------------------

    def _begin(self, plan: Plan, command: str) -> tuple[MlflowClient, str]:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(self.tracking_uri)
        name = self.run_name or (plan.output.resolve().name if plan.output is not None else None)
        made = client.create_run(
            _experiment_id(client, self.experiment_name),
            tags={**_tags(command), **self.tags},
            run_name=name,
        )
        names, run_id = Names(), str(made.info.run_id)
        every = [Param(names[key], value) for key, value in params(plan).items()]
        for start in range(0, len(every), _PARAMS):
            client.log_batch(run_id, params=every[start : start + _PARAMS])
        return client, run_id


def _experiment_id(client: MlflowClient, name: str | None) -> str:
    """Return the id of the experiment with this name; create the experiment if it is missing."""
    from mlflow.exceptions import MlflowException

    name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if name is None:
        return os.environ.get("MLFLOW_EXPERIMENT_ID") or "0"
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another run may have created it at the same time
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _tags(command: str) -> dict[str, str]:
    """Return the user and source that MLflow shows for a run, and geartrain's own tags."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        user = "unknown"
    return {
        "mlflow.user": user,
        "mlflow.source.name": sys.argv[0] if sys.argv else "",
        "mlflow.source.type": "LOCAL",
        "geartrain.version": __version__,
        "geartrain.command": command,
    }
