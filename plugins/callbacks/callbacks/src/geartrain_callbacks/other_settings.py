"""A warning if a ``fit`` resumes with other settings than those in its code."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

from geartrain import Run
from geartrain.plugin_api import warn

#: Settings that a scheduler changes, so that they differ from those in the code.
_SCHEDULED = frozenset(("lr", "momentum", "betas"))
#: Keys of a group that are no settings; QAdam counts its steps there.
_NO_SETTINGS = frozenset(("params", "step"))
#: The types of settings that can be compared.
_COMPARED = {bool, int, float, str, tuple, list, Counter}


def warn_of(run: Run, fit: dict[str, Any], path: Path) -> None:
    """Warn of settings that a checkpoint has and ``configure_optimizers`` has changed.

    In a world of another size rates may depend on the number of ranks, so nothing is compared.

    Args:
        run: the run, before it loads the state of its optimizers.
        fit: the checkpoint's ``"fit"``.
        path: its file.
    """
    other_size = len(fit["ranks"]) != run.world.data_size
    if run.world.rank or run.loop.memory_checkpoint is not None or other_size:
        return
    pairs = [*_of_optimizers(run, fit), *_of_schedulers(run, fit)]
    compared = [(n, a, b) for n, a, b in pairs if {type(a), type(b)} <= _COMPARED]
    # A dict: several groups may have the same difference.
    texts = dict.fromkeys(f"{n} {a} in the file and {b} now" for n, a, b in compared if a != b)
    if texts:
        hint = "start from its weights with checkpoint= (on the command line --checkpoint)"
        message = f"{path} has {', '.join(texts)}. The checkpoint's settings are used"
        warn(f"{message}. Fix if unmeant: {hint}")


def _of_optimizers(run: Run, fit: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return each setting's name, its value in the file and its value now."""
    pairs: list[tuple[str, Any, Any]] = []
    moves = _SCHEDULED if run.schedulers else frozenset()
    for optimizer, saved in zip(run.optimizers, fit["optimizers"], strict=True):
        owner, groups = type(optimizer).__name__, saved["state"].get("param_groups", ())
        for saved_group, group in zip(groups, optimizer.param_groups, strict=False):
            for name in saved_group:
                if name in group and name not in _NO_SETTINGS | moves:
                    setting = f"{owner}'s {name.removeprefix('initial_')}"
                    pairs.append((setting, saved_group[name], group[name]))
    return pairs


def _of_schedulers(run: Run, fit: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs: list[tuple[str, Any, Any]] = []
    for schedule, saved in zip(run.schedulers, fit["schedulers"], strict=True):
        kind, saved_state = type(schedule.scheduler), saved["state"] or {}
        attributes = vars(schedule.scheduler)
        made_with = inspect.signature(kind).parameters.keys() - {"last_epoch"}
        for name in sorted(made_with & saved_state.keys() & attributes.keys()):
            pairs.append((f"{kind.__name__}'s {name}", saved_state[name], attributes[name]))
    return pairs
