"""What plugins import: the one door to core, beside ``geartrain`` itself.

A name is imported when it is first used: a plugin that only reads files or metadata never pays for torch. What is not listed here is
internal, and may change without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geartrain.builtin.precision import SKIPPED as SKIPPED, ScaledPrecision as ScaledPrecision
    from geartrain.checkpoint.checkpoints import (
        checkpoint_state as checkpoint_state,
        find_checkpoint_file as find_checkpoint_file,
        is_last as is_last,
        save_checkpoint_file as save_checkpoint_file,
    )
    from geartrain.checkpoint.files import peek as peek, progress as progress
    from geartrain.checkpoint.training_state import load_optimizer as load_optimizer
    from geartrain.data.loaders import (
        BatchSizer as BatchSizer,
        DataSource as DataSource,
        Through as Through,
        close_batches as close_batches,
        count_batches as count_batches,
        length as length,
        loader_batch_size as loader_batch_size,
    )
    from geartrain.data.sharding import (
        Shard as Shard,
        batches_in_turn as batches_in_turn,
        generators as generators,
        has_no_own_samples as has_no_own_samples,
        samplers as samplers,
        set_epoch as set_epoch,
    )
    from geartrain.errors import describe as describe, nearest as nearest
    from geartrain.errors.hints import hint as hint, write_instead as write_instead
    from geartrain.errors.known import KNOWN as KNOWN
    from geartrain.errors.panel import TRACEBACK as TRACEBACK, panel as panel, traceback_text as traceback_text
    from geartrain.files.atomic import (
        AppendedFile as AppendedFile,
        remove_abandoned as remove_abandoned,
        replacing as replacing,
        write_text_file as write_text_file,
    )
    from geartrain.files.paths import is_url as is_url, user_path as user_path
    from geartrain.hooks.manager import Hooks as Hooks
    from geartrain.hooks.plugin_info import LoadedPlugin as LoadedPlugin, PluginInfo as PluginInfo, state_of as state_of
    from geartrain.hooks.spelling import (
        OF_PLUGINS as OF_PLUGINS,
        STATE as STATE,
        refuse_half_a_state as refuse_half_a_state,
        refuse_misspelt as refuse_misspelt,
    )
    from geartrain.launch.cluster import (
        STARTED_BY as STARTED_BY,
        ClusterEnvironment as ClusterEnvironment,
        check_processes as check_processes,
        detect as detect,
        starts_rank_0 as starts_rank_0,
    )
    from geartrain.launch.forks import (
        call_before_forks as call_before_forks,
        not_inherited as not_inherited,
        share_temporary_folder as share_temporary_folder,
    )
    from geartrain.launch.rerun_command import START_DIRECTORY as START_DIRECTORY, reason_not_rerunnable as reason_not_rerunnable
    from geartrain.launch.signals import SIGNALS as SIGNALS, Interrupted as Interrupted, raise_on_signals as raise_on_signals
    from geartrain.loop.fit import backward as backward, epoch_is_over as epoch_is_over
    from geartrain.loop.optimizers import (
        about_to_step as about_to_step,
        clip as clip,
        mean_over_ranks as mean_over_ranks,
        needs_closure as needs_closure,
        parameters_of as parameters_of,
        read_optimizers as read_optimizers,
    )
    from geartrain.loop.ranks import OneRank as OneRank
    from geartrain.loop.run import Stage as Stage
    from geartrain.loop.step_forwarder import (
        STEPS as STEPS,
        ModuleHooks as ModuleHooks,
        StepForwarder as StepForwarder,
        check_data as check_data,
        check_module as check_module,
        refuse_unrun as refuse_unrun,
    )
    from geartrain.loop.worker import always_tear_down as always_tear_down, init_process_group as init_process_group
    from geartrain.metrics import reductions as reductions
    from geartrain.metrics.local import LocalMetric as LocalMetric, MetricOptions as MetricOptions
    from geartrain.metrics.objects import libraries as libraries
    from geartrain.metrics.store import MetricStore as MetricStore, check_name as check_name, scalar as scalar
    from geartrain.module.hparams import HyperParameters as HyperParameters, hyperparameters as hyperparameters
    from geartrain.module.module import overridden as overridden
    from geartrain.module.nested import map_nested as map_nested, map_tensors as map_tensors, move as move, not_plain as not_plain
    from geartrain.options import Options as Options
    from geartrain.plan import check_joins as check_joins
    from geartrain.planning.components import (
        TrainerArguments as TrainerArguments,
        build_components as build_components,
        core_parts as core_parts,
        reserved_folder as reserved_folder,
    )
    from geartrain.planning.plugin_files import file_plugin as file_plugin, is_file as is_file, load_file as load_file
    from geartrain.planning.rank_properties import RankProperties as RankProperties
    from geartrain.planning.registry import InstalledPlugin as InstalledPlugin, Registry as Registry
    from geartrain.planning.selection import select_accelerator as select_accelerator

#: Module -> the names that plugins may use, as above.
_NAMES = {
    "geartrain.builtin.precision": "SKIPPED ScaledPrecision",
    "geartrain.checkpoint.checkpoints": "checkpoint_state find_checkpoint_file is_last save_checkpoint_file",
    "geartrain.checkpoint.files": "peek progress",
    "geartrain.checkpoint.training_state": "load_optimizer",
    "geartrain.data.loaders": "BatchSizer DataSource Through close_batches count_batches length loader_batch_size",
    "geartrain.data.sharding": "Shard batches_in_turn generators has_no_own_samples samplers set_epoch",
    "geartrain.errors": "describe nearest",
    "geartrain.errors.hints": "hint write_instead",
    "geartrain.errors.known": "KNOWN",
    "geartrain.errors.panel": "TRACEBACK panel traceback_text",
    "geartrain.files.atomic": "AppendedFile remove_abandoned replacing write_text_file",
    "geartrain.files.paths": "is_url user_path",
    "geartrain.hooks.manager": "Hooks",
    "geartrain.hooks.plugin_info": "LoadedPlugin PluginInfo state_of",
    "geartrain.hooks.spelling": "OF_PLUGINS STATE refuse_half_a_state refuse_misspelt",
    "geartrain.launch.cluster": "ClusterEnvironment STARTED_BY check_processes detect starts_rank_0",
    "geartrain.launch.forks": "call_before_forks not_inherited share_temporary_folder",
    "geartrain.launch.rerun_command": "START_DIRECTORY reason_not_rerunnable",
    "geartrain.launch.signals": "Interrupted SIGNALS raise_on_signals",
    "geartrain.loop.fit": "backward epoch_is_over",
    "geartrain.loop.optimizers": "about_to_step clip mean_over_ranks needs_closure parameters_of read_optimizers",
    "geartrain.loop.ranks": "OneRank",
    "geartrain.loop.run": "Stage",
    "geartrain.loop.step_forwarder": ("ModuleHooks STEPS StepForwarder check_data check_module refuse_unrun"),
    "geartrain.loop.worker": "always_tear_down init_process_group",
    "geartrain.metrics": "reductions",
    "geartrain.metrics.objects": "libraries",
    "geartrain.metrics.store": "MetricStore check_name scalar",
    "geartrain.metrics.local": "LocalMetric MetricOptions",
    "geartrain.module.hparams": "HyperParameters hyperparameters",
    "geartrain.module.module": "overridden",
    "geartrain.module.nested": "map_nested map_tensors move not_plain",
    "geartrain.options": "Options",
    "geartrain.plan": "check_joins",
    "geartrain.planning.components": "TrainerArguments build_components core_parts reserved_folder",
    "geartrain.planning.plugin_files": "file_plugin is_file load_file",
    "geartrain.planning.rank_properties": "RankProperties",
    "geartrain.planning.registry": "InstalledPlugin Registry",
    "geartrain.planning.selection": "select_accelerator",
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
