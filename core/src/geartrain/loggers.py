"""``from geartrain.loggers import TensorBoard``: the classes of installed loggers."""

from __future__ import annotations

from functools import partial

from geartrain.planning.lazy_exports import names, resolve

_HOMES = {"CSVLogger": "csv", "MLflow": "mlflow", "TensorBoard": "tensorboard", "WandB": "wandb"}

__getattr__ = partial(resolve, "plugin", __name__, homes=_HOMES)
__dir__ = partial(names, "plugin")
