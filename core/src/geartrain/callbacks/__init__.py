"""Callbacks: plugins of core's own, each a small file. ``from geartrain.callbacks import EarlyStopping``.

They are chosen as any plugin is: ``Trainer(plugins=[EarlyStopping("val_loss")])``, or ``--plugin early_stopping``.
"""

from __future__ import annotations

from typing import Any

from geartrain.callbacks.callback import Callback
from geartrain.callbacks.early_stopping import EarlyStopping
from geartrain.callbacks.ema import EMA
from geartrain.callbacks.lr_monitor import LearningRateMonitor
from geartrain.callbacks.model_checkpoint import ModelCheckpoint
from geartrain.callbacks.model_summary import ModelSummary
from geartrain.callbacks.nan_guard import NaNGuard
from geartrain.callbacks.norms import Norms
from geartrain.callbacks.throughput import Throughput
from geartrain.callbacks.timer import Timer

__all__ = [
    "EMA",
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "NaNGuard",
    "Norms",
    "Throughput",
    "Timer",
]


def __getattr__(name: str) -> Any:
    """Only for names that are not here: those of Lightning's callbacks get what to write instead."""
    from geartrain.porting.names import known

    if not name.startswith("_") and (answer := known(f"callbacks.{name}")):
        # An ImportError, because "from geartrain.callbacks import NAME" would replace the text of an AttributeError.
        raise ImportError(f"geartrain.callbacks has no {name!r}{answer}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
