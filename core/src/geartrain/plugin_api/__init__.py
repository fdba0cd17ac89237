"""The names of core that plugins may import, besides those of ``geartrain``.

Names that need torch are imported when they are first used. A name that is not listed here is
internal and may change without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from geartrain.errors import is_of_user, nearest, warn
from geartrain.errors.hints import write_instead
from geartrain.errors.known import KNOWN
from geartrain.files.atomic import AppendedFile, remove_abandoned, replacing
from geartrain.files.paths import user_path
from geartrain.hooks.manager import Hooks
from geartrain.hooks.plugin_info import LoadedPlugin, PluginInfo
from geartrain.hooks.spelling import OVERRIDES, check_attributes
from geartrain.launch.cluster import ClusterEnvironment, detect
from geartrain.launch.start_directory import START_DIRECTORY
from geartrain.planning.registry import InstalledPlugin, Registry

if TYPE_CHECKING:
    from geartrain.plugin_api.with_torch import *  # noqa: F403

# fmt: off
__all__ = [  # noqa: F405
    "KNOWN", "OVERRIDES", "START_DIRECTORY", "AppendedFile", "BatchSizer", "ClusterEnvironment",
    "DataSource", "Hooks", "InstalledPlugin", "LoadedPlugin", "LocalMetric", "MappedBatches",
    "MetricOptions", "PluginInfo", "RankCoordinator", "Registry", "Stage", "StepForwarder",
    "TrainerBase", "check_attributes", "check_module", "close_batches", "detect", "drawing_from",
    "experiment", "is_of_user", "length", "libraries", "load_optimizer", "map_nested",
    "map_tensors", "match_names", "move", "nearest", "not_plain", "overridden", "parameters_of",
    "plain_step", "put_off_compiler", "raise_on_signals", "read_checkpoint", "reductions",
    "remove_abandoned", "replacing", "step_optimizer", "user_path", "warn", "with_samplers",
    "write_instead",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.with_torch"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
