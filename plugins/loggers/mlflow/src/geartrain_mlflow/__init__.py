"""The plugin ``mlflow`` for geartrain."""

from __future__ import annotations

from geartrain_mlflow._version import __version__
from geartrain_mlflow.plugin import MLflow

__all__ = ["MLflow", "__version__"]
