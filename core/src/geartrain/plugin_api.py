"""What plugins import: the one door to core, beside ``geartrain`` itself and ``geartrain.parallel``.

A name is imported when it is first used: a plugin that only reads files or metadata never pays for torch. What is not listed here is
internal, and may change without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geartrain.builtin.progress.progress import ProgressBar as ProgressBar
    from geartrain.checkpoint.checkpoints import checkpoint_state as checkpoint_state, is_last as is_last, save as save
    from geartrain.checkpoint.files import peek as peek, progress as progress
    from geartrain.checkpoint.resume import load_optimizer as load_optimizer
    from geartrain.commands.arguments import Request as Request, option_names as option_names, read as read
    from geartrain.commands.target import Target as Target
    from geartrain.data.loaders import (
        BatchSizer as BatchSizer,
        DataSource as DataSource,
        Through as Through,
        close_batches as close_batches,
        count_batches as count_batches,
        length as length,
        loader_batch_size as loader_batch_size,
        map_nested as map_nested,
        map_tensors as map_tensors,
        move as move,
        not_plain as not_plain,
    )
    from geartrain.data.sharding import generators as generators, is_spare as is_spare, set_epoch as set_epoch
    from geartrain.errors import nearest as nearest
    from geartrain.errors.hints import write_instead as write_instead
    from geartrain.files.atomic import (
        AppendedFile as AppendedFile,
        remove_abandoned as remove_abandoned,
        replacing as replacing,
        write as write,
    )
    from geartrain.files.paths import is_url as is_url, user_path as user_path
    from geartrain.hooks.manager import Hooks as Hooks, fire as fire
    from geartrain.hooks.plugin_info import Choice as Choice, Part as Part, state_of as state_of
    from geartrain.hooks.spelling import (
        OF_PLUGINS as OF_PLUGINS,
        STATE as STATE,
        refuse_half_a_state as refuse_half_a_state,
        refuse_misspelt as refuse_misspelt,
    )
    from geartrain.launch import bootstrap as bootstrap, rendezvous as rendezvous
    from geartrain.launch.cluster import STARTED_BY as STARTED_BY, Place as Place, detect as detect, starts_rank_0 as starts_rank_0
    from geartrain.launch.forks import share_temporary_folder as share_temporary_folder
    from geartrain.launch.launch import variables as variables
    from geartrain.launch.patience import Patience as Patience
    from geartrain.launch.pickling import Dump as Dump, Refusal as Refusal, plain_dump as plain_dump, refusals as refusals
    from geartrain.launch.reports import ERROR_FILE as ERROR_FILE, is_connection as is_connection, report as report
    from geartrain.launch.signals import SIGNALS as SIGNALS, hear_signals as hear_signals
    from geartrain.loop.evaluate import same_buffers as same_buffers
    from geartrain.loop.optimizers import (
        about_to_step as about_to_step,
        mean_over_ranks as mean_over_ranks,
        needs_closure as needs_closure,
        parameters_of as parameters_of,
        read_optimizers as read_optimizers,
    )
    from geartrain.loop.step_forwarder import (
        IN_STEP as IN_STEP,
        NOT_CALLED as NOT_CALLED,
        NOT_CALLED_OF_DATA as NOT_CALLED_OF_DATA,
        STEPS as STEPS,
        ModuleHooks as ModuleHooks,
        Step as Step,
        check_data as check_data,
        check_module as check_module,
        refuse_unrun as refuse_unrun,
    )
    from geartrain.loop.worker import (
        always_tear_down as always_tear_down,
        compare_with_rank_0 as compare_with_rank_0,
        join_others as join_others,
    )
    from geartrain.metrics import reductions as reductions
    from geartrain.metrics.store import Logs as Logs, check_name as check_name, scalar as scalar
    from geartrain.metrics.sync import Share as Share, Spec as Spec, sync as sync
    from geartrain.metrics.torchmetrics import is_metric as is_metric, places as places, put as put
    from geartrain.module.hparams import HyperParameters as HyperParameters, hyperparameters as hyperparameters
    from geartrain.module.module import overridden as overridden
    from geartrain.options import Options as Options
    from geartrain.plan import check_joins as check_joins, complete as complete
    from geartrain.planning.components import (
        Asked as Asked,
        assemble as assemble,
        core_parts as core_parts,
        recipes as recipes,
        remake as remake,
        reserved_folder as reserved_folder,
    )
    from geartrain.planning.rank_properties import Placed as Placed
    from geartrain.planning.registry import KNOWN as KNOWN, Candidate as Candidate, Registry as Registry
    from geartrain.planning.selection import choose_accelerator as choose_accelerator

#: Module -> the names that plugins may use, as above.
_NAMES = {
    "geartrain.builtin.progress.progress": "ProgressBar",
    "geartrain.checkpoint.checkpoints": "checkpoint_state is_last save",
    "geartrain.checkpoint.files": "peek progress",
    "geartrain.checkpoint.resume": "load_optimizer",
    "geartrain.commands.arguments": "Request option_names read",
    "geartrain.commands.target": "Target",
    "geartrain.data.loaders": "BatchSizer DataSource Through close_batches count_batches length loader_batch_size",
    "geartrain.data.sharding": "generators is_spare set_epoch",
    "geartrain.errors": "nearest",
    "geartrain.errors.known": "KNOWN",
    "geartrain.errors.hints": "write_instead",
    "geartrain.files.atomic": "AppendedFile remove_abandoned replacing write",
    "geartrain.files.paths": "is_url user_path",
    "geartrain.hooks.manager": "Hooks fire",
    "geartrain.hooks.plugin_info": "Choice Part state_of",
    "geartrain.hooks.spelling": "OF_PLUGINS STATE refuse_half_a_state refuse_misspelt",
    "geartrain.launch": "bootstrap rendezvous",
    "geartrain.launch.cluster": "Place STARTED_BY detect starts_rank_0",
    "geartrain.launch.forks": "share_temporary_folder",
    "geartrain.launch.launch": "variables",
    "geartrain.launch.patience": "Patience",
    "geartrain.launch.pickling": "Dump Refusal plain_dump refusals",
    "geartrain.launch.reports": "ERROR_FILE is_connection report",
    "geartrain.launch.signals": "SIGNALS hear_signals",
    "geartrain.loop.evaluate": "same_buffers",
    "geartrain.loop.optimizers": "about_to_step mean_over_ranks needs_closure parameters_of read_optimizers",
    "geartrain.loop.step_forwarder": "IN_STEP ModuleHooks NOT_CALLED NOT_CALLED_OF_DATA STEPS Step check_data check_module refuse_unrun",
    "geartrain.loop.worker": "always_tear_down compare_with_rank_0 join_others",
    "geartrain.metrics": "reductions",
    "geartrain.metrics.store": "Logs check_name scalar",
    "geartrain.metrics.sync": "Share Spec sync",
    "geartrain.metrics.torchmetrics": "is_metric places put",
    "geartrain.module.hparams": "HyperParameters hyperparameters",
    "geartrain.module.nested": "map_nested map_tensors move not_plain",
    "geartrain.module.module": "overridden",
    "geartrain.options": "Options",
    "geartrain.plan": "check_joins complete",
    "geartrain.planning.components": "Asked assemble core_parts recipes remake reserved_folder",
    "geartrain.planning.rank_properties": "Placed",
    "geartrain.planning.registry": "Candidate Registry",
    "geartrain.planning.selection": "choose_accelerator",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
