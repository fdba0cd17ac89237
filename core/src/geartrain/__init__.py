"""geartrain: a minimal PyTorch training loop that fires pluggy hooks.

torch is imported when a name that needs it is first used, so that ``import geartrain``, listing
plugins and completing a command line are fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from geartrain._version import __version__
from geartrain.errors import GeartrainError, TrainingError, UsageError
from geartrain.hookspecs import hookimpl, hookspec
from geartrain.launch import start_directory as _start_directory  # noqa: F401 (is read now)

if TYPE_CHECKING:
    from geartrain.data.seeding import seed_everything
    from geartrain.loop.run import Run, World
    from geartrain.module.module import DataModule, Module
    from geartrain.plan import Layout, Plan, PlanRequest
    from geartrain.trainer import Trainer
    from geartrain_callbacks import CombinedLoader
    from geartrain_cli import cli
    from geartrain_session import Session

    Fabric = Session
    LightningModule = Module
    LightningDataModule = DataModule

# Public name -> its module, and its name there if the public name is Lightning's.
_LAZY = {
    "CombinedLoader": "geartrain_callbacks",
    "DataModule": "geartrain.module.module",
    "Fabric": "geartrain_session:Session",
    "Layout": "geartrain.plan",
    "LightningDataModule": "geartrain.module.module:DataModule",
    "LightningModule": "geartrain.module.module:Module",
    "Module": "geartrain.module.module",
    "Plan": "geartrain.plan",
    "PlanRequest": "geartrain.plan",
    "Run": "geartrain.loop.run",
    "Session": "geartrain_session",
    "Trainer": "geartrain.trainer",
    "World": "geartrain.loop.run",
    "cli": "geartrain_cli",
    "seed_everything": "geartrain.data.seeding",
}

#: Modules that need no import, like ``pl.callbacks``: ``gt.callbacks.EarlyStopping``.
_MODULES = ("accelerators", "callbacks", "loggers", "strategies", "testing", "tuning")

__all__ = [
    "CombinedLoader",
    "DataModule",
    "GeartrainError",
    "Layout",
    "LightningDataModule",
    "LightningModule",
    "Module",
    "Plan",
    "PlanRequest",
    "Run",
    "Trainer",
    "TrainingError",
    "UsageError",
    "World",
    "__version__",
    "cli",
    "hookimpl",
    "hookspec",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"geartrain.{name}")
    if name not in _LAZY:
        from geartrain.errors.hints import write_instead

        instead = write_instead("geartrain", name)
        raise AttributeError(f"module 'geartrain' has no attribute {name!r}{instead}")
    module, _, attribute = _LAZY[name].partition(":")
    if module.startswith("geartrain_"):
        from geartrain.errors.distributions import import_from

        value = getattr(import_from(module, f"geartrain.{name}"), attribute or name)
    else:
        value = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
