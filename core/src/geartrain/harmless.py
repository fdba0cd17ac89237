"""Plugins that must never stop a run: loggers and monitors say ``harmless = True`` on their class."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from geartrain.parts import Part

#: Called even after another hookimpl failed, so that what is open can be closed.
_LAST = ("on_run_end", "on_exception")


def guarded(part: Part, events: Mapping[str, str | None]) -> types.SimpleNamespace:
    """What is registered in a harmless plugin's place: the same hookimpls, whose errors are warnings.

    After the first error none is called again in this run but those that close what is open.

    Args:
        events: the attribute of each hookimpl -> its hook, or ``None`` where it is to stay as it is.
    """
    failed: list[Exception] = []
    stands_in = types.SimpleNamespace()
    for attribute, hook in events.items():
        function = getattr(part.plugin, attribute)
        setattr(stands_in, attribute, function if hook is None else _guard(part, hook, function, failed))
    return stands_in


def _guard(part: Part, hook: str, function: Callable[..., Any], failed: list[Exception]) -> Callable[..., Any]:
    @functools.wraps(function)  # pluggy reads the arguments and the mark of the original through it
    def call(*arguments: Any) -> Any:
        if failed and hook not in _LAST:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            if not failed:
                warnings.warn(
                    f"{part.choice.label}: {hook} raised {type(error).__name__}: {error}. The run goes on without it.", stacklevel=2
                )
            failed.append(error)
            return None

    return call
