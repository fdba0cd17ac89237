"""The checks of a new Session: unknown arguments, and plugins that need a Trainer's loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from geartrain import Trainer, UsageError
from geartrain.plugin_api import Hooks, LoadedPlugin, nearest, warn

#: Hooks that a Session does not fire: only a Trainer's loop knows epochs and validation.
NOT_FIRED = ("on_epoch_start", "on_epoch_end", "on_validation_start", "on_validation_end")
#: Hooks around a whole step or micro-batch, which a Session does not call. The exception is a
#: strategy's ``micro_step``, which it calls in ``no_backward_sync``.
NOT_AROUND = ("step", "micro_step")


def refuse_unknown(unknown: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise for an argument that Session does not have.

    Raises:
        UsageError: an argument is unknown; the message names the replacement.
    """
    for name in unknown:
        if name in ("loggers", "logger"):
            raise UsageError(f"Session has no argument {name!r}. Write: plugins=[...]")
        if name in inspect.signature(Trainer).parameters:
            raise UsageError(
                f"Session has no argument {name!r}, which belongs to a Trainer's loop. "
                "Fix: write it in your loop"
            )
        raise UsageError(f"Session has no argument {name!r}. {nearest(name, list(known))}")


def check_hooks(hooks: Hooks, parts: Iterable[LoadedPlugin]) -> None:
    """Raise for plugins with hooks that a Session does not fire.

    Only warn if the plugin sets ``errors_are_warnings``, or ``optionalhook=True`` on those hooks.

    Raises:
        UsageError: a plugin needs such a hook.
    """
    for part in parts:
        info = part.info
        if info.distribution == "geartrain":
            continue
        watched = NOT_FIRED + NOT_AROUND if info.kind == "plugin" else ("step",)
        missed = [hook for hook in watched if info in hooks.implementers(hook)]
        message = (
            f"{info.label}: a Session never calls {', '.join(missed)}: epochs, validation and "
            "whole steps belong to your loop"
        )
        works_without = getattr(part.plugin, "errors_are_warnings", False) or all(
            _is_optional(part.plugin, hook) for hook in missed
        )
        if set(missed) & set(NOT_AROUND) or not works_without:
            raise UsageError(f"{message}. Fix: do its work in the loop, or use geartrain.Trainer")
        if missed:
            warn(message)


def _is_optional(plugin: Any, hook: str) -> bool:
    marked = getattr(getattr(plugin, hook, None), "geartrain_impl", {})
    return bool(marked.get("optionalhook"))
