"""The thread that talks to MLflow, so that training never waits for a server."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain import TrainingError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

#: MLflow's limit of metrics per call, mlflow.utils.validation.MAX_METRICS_PER_BATCH.
BATCH = 1000


class Upload:
    """Send one run to MLflow. Items added during a call are sent in the next call.

    Args:
        begin: creates the run; called in the thread, because it may wait for a server.
    """

    def __init__(self, begin: Callable[[], tuple[MlflowClient, str]]) -> None:
        self._begin = begin
        self._changed = threading.Condition()
        self._metrics: list[Metric] = []
        #: Files to send; a dict, so that a file saved twice is sent once.
        self._files: dict[str, None] = {}
        #: Name and content of files that are not on disk.
        self._media: list[tuple[str, bytes]] = []
        self._status: str | None = None
        self._begun: tuple[MlflowClient, str] | None = None
        self._abandoned = False
        #: The error that ended the thread early.
        self.error: Exception | None = None
        # A daemon, so that a server that does not answer cannot keep the program alive.
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def begun(self, patience: float) -> tuple[MlflowClient, str]:
        """Wait until MLflow has created the run; return the client and the run's id.

        Raises:
            TrainingError: it took longer than ``patience`` seconds.
            Exception: the thread's error.
        """
        with self._changed:
            ready = self._changed.wait_for(lambda: self._begun or self.error, patience)
        self._look()
        if not ready or self._begun is None:
            message = f"MLflow has not created the run within {patience:g} s"
            raise TrainingError(f"{message}. Fix: use a longer patience")
        return self._begun

    def add(
        self,
        metrics: Iterable[Metric] = (),
        files: Iterable[str] = (),
        media: Iterable[tuple[str, bytes]] = (),
    ) -> None:
        """Queue items to send.

        Raises:
            Exception: the thread's error, if it has ended.
        """
        self._look()
        with self._changed:
            self._metrics.extend(metrics)
            self._files.update(dict.fromkeys(files))
            self._media.extend(media)
            self._changed.notify()

    def finish(self, status: str, patience: float) -> None:
        """Send the rest and close the run with ``status``.

        Raises:
            TrainingError: it took longer than ``patience`` seconds; the thread ends after its
                current call.
            Exception: the thread's error.
        """
        with self._changed:
            self._status = status
            self._changed.notify()
        self._thread.join(patience)
        if self._thread.is_alive():
            self._abandoned = True
            raise TrainingError(
                f"MLflow has not taken everything within {patience:g} s; the rest is lost. "
                "Fix: use a longer patience"
            )
        self._look()

    def _look(self) -> None:
        if self.error is not None:
            raise self.error

    # --- in the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        client = None
        try:
            client, run_id = self._begin()
            with self._changed:
                self._begun = client, run_id
                self._changed.notify_all()
            while not self._abandoned:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._metrics or self._files or self._media or self._status
                    )
                    metrics, files, media = self._metrics, list(self._files), self._media
                    self._metrics, self._files, self._media = [], {}, []
                    status = self._status
                self._send(client, run_id, metrics, files)
                self._send_media(client, run_id, media)
                if status is not None and not self._abandoned:  # nothing follows
                    client.set_terminated(run_id, status)
                    break
        except Exception as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()
        finally:
            _close(client)

    def _send(
        self, client: MlflowClient, run_id: str, metrics: Sequence[Metric], files: Iterable[str]
    ) -> None:
        for start in range(0, len(metrics), BATCH):
            if not self._abandoned:
                client.log_batch(run_id, metrics=metrics[start : start + BATCH])
        for file in files:
            if not self._abandoned:
                try:
                    client.log_artifact(run_id, file, "checkpoints")
                except Exception:
                    if os.path.exists(file):
                        raise
                    # A better checkpoint has replaced this one, which is deleted.

    def _send_media(
        self, client: MlflowClient, run_id: str, media: Iterable[tuple[str, bytes]]
    ) -> None:
        for name, data in media:
            if self._abandoned:
                return
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / Path(name).name
                file.write_bytes(data)
                client.log_artifact(run_id, str(file), f"media/{Path(name).parent}")


def _close(client: Any) -> None:
    """Close the database connections that MLflow keeps open; it opens new ones when needed."""
    with contextlib.suppress(AttributeError):
        client._tracking_client.store.engine.dispose()
