"""Callbacks: each is a plugin in a small file. ``from geartrain.callbacks import EarlyStopping``.

Select one like any plugin: ``Trainer(plugins=[EarlyStopping("val_loss")])`` or
``--plugin early_stopping``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from geartrain_callbacks._version import __version__ as __version__

if TYPE_CHECKING:
    from geartrain_callbacks.accumulation_scheduler import GradientAccumulationScheduler
    from geartrain_callbacks.async_checkpoint import AsyncCheckpoint
    from geartrain_callbacks.callback import NOT_CALLED, Callback
    from geartrain_callbacks.combined import CombinedLoader
    from geartrain_callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
    from geartrain_callbacks.ema import EMA
    from geartrain_callbacks.fast import Fast
    from geartrain_callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from geartrain_callbacks.fit_memory import FitMemory
    from geartrain_callbacks.lambda_callback import LambdaCallback
    from geartrain_callbacks.lr_monitor import LearningRateMonitor
    from geartrain_callbacks.media import Histogram, Media, Table
    from geartrain_callbacks.model_checkpoint import ModelCheckpoint
    from geartrain_callbacks.model_summary import ModelSummary
    from geartrain_callbacks.nan_guard import NaNGuard
    from geartrain_callbacks.norms import Norms, grad_norm
    from geartrain_callbacks.partial_weights import PartialWeights
    from geartrain_callbacks.precision import MixedPrecision, ScaledPrecision, TruePrecision
    from geartrain_callbacks.prediction_writer import BasePredictionWriter, PredictionWriter
    from geartrain_callbacks.progress_bar import ProgressBar, RichProgressBar, TQDMProgressBar
    from geartrain_callbacks.swa import StochasticWeightAveraging
    from geartrain_callbacks.throughput import Throughput
    from geartrain_callbacks.throughput_monitor import ThroughputMonitor
    from geartrain_callbacks.timer import Timer
    from geartrain_callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "EMA",
    "NOT_CALLED",
    "AsyncCheckpoint",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "Callback",
    "CombinedLoader",
    "EMAWeightAveraging",
    "EarlyStopping",
    "EarlyStoppingReason",
    "Fast",
    "FitMemory",
    "GradientAccumulationScheduler",
    "Histogram",
    "LambdaCallback",
    "LearningRateMonitor",
    "Media",
    "MixedPrecision",
    "ModelCheckpoint",
    "ModelSummary",
    "NaNGuard",
    "Norms",
    "PartialWeights",
    "PredictionWriter",
    "ProgressBar",
    "RichProgressBar",
    "ScaledPrecision",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "Table",
    "Throughput",
    "ThroughputMonitor",
    "Timer",
    "TruePrecision",
    "WeightAveraging",
    "grad_norm",
]

#: Module -> its names, imported on first use: a run with ``--plugin csv`` needs no other callback.
_NAMES = {
    "accumulation_scheduler": "GradientAccumulationScheduler",
    "async_checkpoint": "AsyncCheckpoint",
    "callback": "NOT_CALLED Callback",
    "combined": "CombinedLoader",
    "early_stopping": "EarlyStopping EarlyStoppingReason",
    "ema": "EMA",
    "fast": "Fast",
    "finetuning": "BackboneFinetuning BaseFinetuning",
    "fit_memory": "FitMemory",
    "lambda_callback": "LambdaCallback",
    "lr_monitor": "LearningRateMonitor",
    "media": "Histogram Media Table",
    "model_checkpoint": "ModelCheckpoint",
    "model_summary": "ModelSummary",
    "nan_guard": "NaNGuard",
    "norms": "Norms grad_norm",
    "partial_weights": "PartialWeights",
    "precision": "MixedPrecision ScaledPrecision TruePrecision",
    "prediction_writer": "BasePredictionWriter PredictionWriter",
    "progress_bar": "ProgressBar RichProgressBar TQDMProgressBar",
    "swa": "StochasticWeightAveraging",
    "throughput": "Throughput",
    "throughput_monitor": "ThroughputMonitor",
    "timer": "Timer",
    "weight_averaging": "EMAWeightAveraging WeightAveraging",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a name. For a name of Lightning that does not exist, name the replacement."""
    if name in _HOMES:
        globals()[name] = getattr(import_module(f"geartrain_callbacks.{_HOMES[name]}"), name)
        return globals()[name]
    from geartrain import UsageError
    from geartrain.plugin_api import Registry, write_instead

    if name == "DeviceStatsMonitor":  # of geartrain-monitor
        try:
            return (registry := Registry()).load(registry.find("plugin", "device_stats"))
        except UsageError as error:
            raise ImportError(str(error), name=__name__) from error
    if not name.startswith("_") and (answer := write_instead("geartrain.callbacks", name)):
        # An ImportError, because "from ... import NAME" would replace an AttributeError's text.
        raise ImportError(f"geartrain.callbacks has no {name!r}{answer}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
