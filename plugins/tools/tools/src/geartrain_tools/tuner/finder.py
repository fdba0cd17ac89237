"""A finder's trainer: the user's, without the plugins that watch a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from geartrain import Trainer, UsageError, __version__, hookspecs
from geartrain.plugin_api import Hooks, LoadedPlugin, PluginInfo


def finder(trainer: Trainer, recorder: Any, steps: int, **options: Any) -> Trainer:
    """Return a trainer for ``steps`` optimizer steps.

    It has the user's accelerator, strategy, precision and data options, but no validation, progress
    bar, folder or plugins that watch a run.

    Args:
        trainer: the user's trainer; unchanged.
        recorder: the finder's own plugin.
        steps: optimizer steps to train.
        options: other options of the trainer to change.
    """
    changed: dict[str, Any] = {
        "max_epochs": -1,
        "min_epochs": None,
        "max_steps": steps,
        "min_steps": None,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
        "enable_progress_bar": False,
    }
    plan = replace(
        trainer.plan, options=replace(trainer.plan.options, **{**changed, **options}), output=None
    )
    chosen = [
        part
        for part in trainer.setup.parts
        if part.info.kind in ("precision", "accelerator", "strategy")
    ]
    recorder_part = LoadedPlugin(
        PluginInfo(type(recorder).__name__, "plugin", "geartrain", __version__, "geartrain tune"),
        recorder,
    )
    kept = [part for part in _plugins(trainer) if not watches(trainer, part)]
    made = object.__new__(type(trainer))
    plan = replace(plan, plugins=tuple(part.info for part in (*kept, recorder_part)))
    setup = trainer.setup.with_plugins(plan, (*chosen, *kept, recorder_part))
    hooks = Hooks(setup.parts)
    vars(made).update(vars(trainer), datamodule=None, _run=None, _setup=setup, hooks=hooks)
    return made


def watches(trainer: Trainer, part: LoadedPlugin) -> bool:
    """True if a plugin watches the run.

    Such a plugin implements an event, ``log_metrics`` or ``device_stats``, and replaces no owner.
    Other plugins only wrap or own single hooks, or hooks of the strategy: they are part of the
    computation.
    """
    if getattr(part.plugin, "replaces", ()):
        return False
    events = (
        name
        for name in vars(hookspecs)
        if name in trainer.hooks.names and not trainer.hooks.is_single(name)
    )
    return any(
        part.info in trainer.hooks.implementers(name) for name in events if name != "check_plan"
    )


def left_out(trainer: Trainer) -> list[str]:
    """Return the labels of the selected plugins that a finder leaves out."""
    return [part.info.label for part in _plugins(trainer) if watches(trainer, part)]


def _plugins(trainer: Trainer) -> list[LoadedPlugin]:
    """Return the selected plugins, except the progress plugin, which a finder turns off."""
    return [
        part
        for part in trainer.setup.parts
        if part.info.kind == "plugin" and not getattr(part.plugin, "shows_progress", False)
    ]


def check(trainer: Trainer, loaders: Any) -> None:
    """Refuse a trainer or loader that a finder cannot use.

    Raises:
        UsageError: ``fast_dev_run`` is set, or the loader can be iterated only once.
    """
    if trainer.plan.options.fast_dev_run:
        raise UsageError(
            "fast_dev_run tries a few batches of everything, and finds nothing. "
            "Fix: leave one of the two out"
        )
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        if hasattr(loader, "__next__"):
            raise UsageError(
                f"the training loader is an iterator ({type(loader).__name__}), "
                "which a finder would use up. "
                "Fix: use a DataLoader, or an iterable that starts from the beginning each time"
            )


def print_line(trainer: Trainer, text: str) -> None:
    """Print one line on rank 0's standard error."""
    if trainer.is_global_zero:
        print(text, file=sys.stderr, flush=True)
