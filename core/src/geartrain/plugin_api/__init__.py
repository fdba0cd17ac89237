"""The names of core that plugins may import, besides those of ``geartrain``.

Names that need torch are imported when they are first used. A name that is listed neither here nor
in ``with_torch`` is internal and may change without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from geartrain.errors import describe as describe, nearest as nearest
from geartrain.errors.hints import hint as hint, write_instead as write_instead
from geartrain.errors.known import KNOWN as KNOWN
from geartrain.files.atomic import (
    AppendedFile as AppendedFile,
    remove_abandoned as remove_abandoned,
    replacing as replacing,
)
from geartrain.files.paths import user_path as user_path
from geartrain.hooks.manager import Hooks as Hooks
from geartrain.hooks.plugin_info import LoadedPlugin as LoadedPlugin, PluginInfo as PluginInfo
from geartrain.hooks.spelling import (
    OF_PLUGINS as OF_PLUGINS,
    OVERRIDES as OVERRIDES,
    STATE as STATE,
    refuse_half_a_state as refuse_half_a_state,
    refuse_misspelt as refuse_misspelt,
)
from geartrain.launch.cluster import (
    STARTED_BY as STARTED_BY,
    ClusterEnvironment as ClusterEnvironment,
    check_processes as check_processes,
    detect as detect,
    read_numbers as read_numbers,
    starts_rank_0 as starts_rank_0,
)
from geartrain.launch.rerun_command import (
    START_DIRECTORY as START_DIRECTORY,
    reason_not_rerunnable as reason_not_rerunnable,
)
from geartrain.loop.run import Stage as Stage
from geartrain.module.hparams import (
    HyperParameters as HyperParameters,
    hyperparameters as hyperparameters,
)
from geartrain.options import Duration as Duration, seconds as seconds
from geartrain.planning.plugin_files import (
    file_plugin as file_plugin,
    is_file as is_file,
    load_file as load_file,
)
from geartrain.planning.rank_properties import RankProperties as RankProperties
from geartrain.planning.registry import InstalledPlugin as InstalledPlugin, Registry as Registry
from geartrain.planning.selection import select_accelerator as select_accelerator

if TYPE_CHECKING:
    from geartrain.plugin_api.with_torch import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.with_torch")
    if not hasattr(home, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(home, name)
    return value


def __dir__() -> list[str]:
    with_torch = import_module(f"{__name__}.with_torch")
    own = {"Any", "TYPE_CHECKING", "annotations", "import_module", "with_torch"}
    names = {*globals(), *vars(with_torch)} - own
    return sorted(name for name in names if not name.startswith("_"))
