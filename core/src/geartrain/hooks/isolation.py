"""Plugins whose errors never stop a run: their class has ``errors_are_warnings = True``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pluggy import HookCaller

from geartrain.errors import UsageError, warn
from geartrain.hooks.checks import Impl, is_single, wrong
from geartrain.hooks.plugin_info import LoadedPlugin

#: Called even after another hookimpl failed, so that the plugin can close its files.
_LAST = ("on_run_end", "on_exception")


def guarded(
    part: LoadedPlugin, impls: Sequence[Impl], specs: Mapping[str, HookCaller]
) -> types.SimpleNamespace:
    """Return an object with the plugin's hookimpls, whose errors become warnings.

    After the first error only ``on_run_end`` and ``on_exception`` are called in this run. A
    ``UsageError`` in ``on_run_start`` ends the run. So does every error in ``check_plan``, and in a
    single hook that the plugin owns.

    Raises:
        UsageError: the plugin has a wrapper, whose error would lose the owner's result.
    """
    failed: list[Exception] = []

    def fail(hook: str, error: Exception) -> None:
        if hook == "on_run_start" and isinstance(error, UsageError):  # refuses before training
            raise error
        if not failed:
            message = f"{part.info.label}: {hook} raised {type(error).__name__}: {error}"
            warn(f"{message}. The run continues without this plugin.")
        failed.append(error)

    replacement = types.SimpleNamespace()
    for impl in impls:
        if impl.wrapper:
            message = "is a wrapper, and errors_are_warnings = True covers events only"
            hint = "use an event, as on_step_end, or take out errors_are_warnings"
            wrong(part, impl.attribute, message, hint)
        function, hook = getattr(part.plugin, impl.attribute), impl.hook
        if hook in specs and hook != "check_plan" and not is_single(specs[hook]):
            out = failed if hook not in _LAST else ()
            function = _guard(function, functools.partial(fail, hook), out)
        setattr(replacement, impl.attribute, function)
    return replacement


def _guard(
    function: Callable[..., Any], fail: Callable[[Exception], None], out: Sequence[Exception]
) -> Callable[..., Any]:
    """Guard a hookimpl of an event; do not call it if ``out`` holds an error."""

    @functools.wraps(function)  # so that pluggy finds the original's arguments and mark
    def call(*arguments: Any, **named: Any) -> Any:
        if not out:
            try:
                return function(*arguments, **named)
            except Exception as error:
                fail(error)
        return None

    return call
