"""Plugins whose errors never stop a run: loggers and monitors say ``errors_are_warnings = True`` on their class."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pluggy import HookCaller

from geartrain.errors import UsageError
from geartrain.hooks.checks import Impl, is_single, wrong
from geartrain.hooks.plugin_info import LoadedPlugin

#: Called even after another hookimpl failed, so that the plugin can close its files.
_LAST = ("on_run_end", "on_exception")


def guarded(
    part: LoadedPlugin, impls: Sequence[Impl], specs: Mapping[str, HookCaller]
) -> types.SimpleNamespace:
    """Return an object with the same hookimpls, whose errors are warnings. It is registered instead of the plugin.

    After the first error only ``on_run_end`` and ``on_exception`` are called in this run. A ``UsageError`` of ``on_run_start`` ends the
    run, and so does every error of ``check_plan`` and of a single hook that the plugin owns.

    Raises:
        UsageError: the plugin has a wrapper, without which the owner's result would be lost.
    """
    failed: list[Exception] = []

    def fail(hook: str, error: Exception) -> None:
        if hook == "on_run_start" and isinstance(
            error, UsageError
        ):  # a refusal before training starts
            raise error
        if not failed:
            what = f"{part.info.label}: {hook} raised {type(error).__name__}: {error}"
            warnings.warn(f"{what}. The run continues without this plugin.", stacklevel=3)
        failed.append(error)

    replacement = types.SimpleNamespace()
    for impl in impls:
        if impl.wrapper:
            fix = "use an event, as on_step_end, or take out errors_are_warnings"
            wrong(
                part,
                impl.attribute,
                "is a wrapper, and errors_are_warnings = True covers events only",
                fix,
            )
        function = getattr(part.plugin, impl.attribute)
        if impl.hook in specs and impl.hook != "check_plan" and not is_single(specs[impl.hook]):
            function = _guard(
                function,
                functools.partial(fail, impl.hook),
                failed if impl.hook not in _LAST else (),
            )
        setattr(replacement, impl.attribute, function)
    return replacement


def _guard(
    function: Callable[..., Any], fail: Callable[[Exception], None], out: Sequence[Exception]
) -> Callable[..., Any]:
    """Guard a hookimpl of an event. It is not called if ``out`` holds an error."""

    @functools.wraps(function)  # pluggy reads the arguments and the mark of the original through it
    def call(*arguments: Any, **named: Any) -> Any:
        if not out:
            try:
                return function(*arguments, **named)
            except Exception as error:
                fail(error)
        return None

    return call
