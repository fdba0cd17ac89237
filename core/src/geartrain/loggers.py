"""``from geartrain.loggers import TensorBoard``: classes of whatever loggers are installed, found by their entry points."""

from __future__ import annotations

from typing import Any

from geartrain.planning.lazy_exports import names, resolve

_HOMES = {"CSVLogger": "csv", "MLflow": "mlflow", "TensorBoard": "tensorboard", "WandB": "wandb"}


def __getattr__(name: str) -> Any:
    return resolve("plugin", __name__, name, _HOMES)


def __dir__() -> list[str]:
    return names("plugin")
