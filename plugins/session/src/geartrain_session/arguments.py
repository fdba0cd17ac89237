"""Checks when a Session is made: unknown arguments, and plugins that need a Trainer's loop."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from geartrain import Trainer, UsageError
from geartrain.plugin_api import Hooks, LoadedPlugin, nearest

#: Hooks around what only a Trainer's loop knows: a Session does not fire them.
NOT_FIRED = ("on_epoch_start", "on_epoch_end", "on_validation_start", "on_validation_end")
#: Hooks around a whole step or micro-batch: a Session does not call them. It calls a strategy's ``micro_step`` in ``no_backward_sync``.
NOT_AROUND = ("step", "micro_step")


def refuse_unknown(unknown: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse an argument that Session does not have, with the replacement.

    Raises:
        UsageError: an argument is unknown.
    """
    for name in unknown:
        if name in ("loggers", "logger"):
            raise UsageError(f"Session has no argument {name!r}. Write: plugins=[...]")
        if name in inspect.signature(Trainer).parameters:
            raise UsageError(
                f"Session has no argument {name!r}, which belongs to a Trainer's loop: write it in your own"
            )
        raise UsageError(f"Session has no argument {name!r}. {nearest(name, list(known))}")


def check_hooks(hooks: Hooks, parts: Iterable[LoadedPlugin]) -> None:
    """Refuse plugins with hooks that a Session does not fire.

    Warn if the plugin is ``errors_are_warnings``, or has ``optionalhook=True`` on those hooks.

    Raises:
        UsageError: names the plugin, the hooks and the fix.
    """
    for part in parts:
        info = part.info
        if info.distribution == "geartrain":
            continue
        watched = NOT_FIRED + NOT_AROUND if info.kind == "plugin" else ("step",)
        missed = [hook for hook in watched if info in hooks.implementers(hook)]
        what = f"{info.label}: a Session never calls {', '.join(missed)}: epochs, validation and whole steps are your loop's"
        works_without = getattr(part.plugin, "errors_are_warnings", False) or all(
            _is_optional(part.plugin, hook) for hook in missed
        )
        if set(missed) & set(NOT_AROUND) or not works_without:
            raise UsageError(f"{what}. Fix: do in the loop what it does, or use geartrain.Trainer")
        if missed:
            warnings.warn(what, stacklevel=3)


def _is_optional(plugin: Any, hook: str) -> bool:
    marked = getattr(getattr(plugin, hook, None), "geartrain_impl", {})
    return bool(marked.get("optionalhook"))
