"""Plugins that must never stop a run: loggers and monitors say ``errors_are_warnings = True`` on their class."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from geartrain.errors import UsageError
from geartrain.hooks.plugin_info import LoadedPlugin

#: Called even after another hookimpl failed, so that what is open can be closed.
_LAST = ("on_run_end", "on_exception")


def guarded(part: LoadedPlugin, hooks: Mapping[str, str | None], wrappers: Container[str]) -> types.SimpleNamespace:
    """What is registered in a harmless plugin's place: the same hookimpls, whose errors are warnings.

    After the first error none is called again in this run but those that close what is open. A ``UsageError`` of ``on_run_start``
    ends the run.

    Args:
        hooks: the attribute of each hookimpl -> its hook, or ``None`` where it is to stay as it is.
        wrappers: the attributes that are wrappers.
    """
    failed: list[Exception] = []

    def fail(hook: str, error: Exception) -> None:
        if hook == "on_run_start" and isinstance(error, UsageError):  # it refuses what it is to watch, before training starts
            raise error
        if not failed:
            warnings.warn(f"{part.info.label}: {hook} raised {type(error).__name__}: {error}. The run goes on without it.", stacklevel=3)
        failed.append(error)

    stands_in = types.SimpleNamespace()
    for attribute, hook in hooks.items():
        function = getattr(part.plugin, attribute)
        if hook is not None:
            guard = _guard_wrapper if attribute in wrappers else _guard
            function = guard(function, partial(fail, hook), failed if hook not in _LAST else ())
        setattr(stands_in, attribute, function)
    return stands_in


def _guard(function: Callable[..., Any], fail: Callable[[Exception], None], out: Sequence[Exception]) -> Callable[..., Any]:
    """An event's hookimpl, left out where ``out`` holds an error."""

    @functools.wraps(function)  # pluggy reads the arguments and the mark of the original through it
    def call(*arguments: Any, **named: Any) -> Any:
        if not out:
            try:
                return function(*arguments, **named)
            except Exception as error:
                fail(error)
        return None

    return call


def _guard_wrapper(function: Callable[..., Any], fail: Callable[[Exception], None], out: Sequence[Exception]) -> Callable[..., Any]:
    """Guard a wrapper: if it fails, warn, leave it out, and return its owner's result or raise its owner's error."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Generator[None, Any, Any]:
        around = None if out else _begin(function, arguments, fail)
        if around is None:
            return (yield)
        try:
            result = yield
        except BaseException as error:
            return _throw(around, error, fail)
        try:
            around.send(result)
        except StopIteration as end:
            if end.value is not None or result is None:
                return end.value
            if not isinstance(result, list):  # nobody reads the list of an event's results
                fail(RuntimeError(f"the wrapper made None of the owner's {type(result).__name__}"))
        except Exception as error:
            fail(error)
        else:
            _yielded_twice(around, fail)
        return result

    return call


def _begin(function: Callable[..., Any], arguments: tuple[Any, ...], fail: Callable[[Exception], None]) -> Generator[None, Any, Any] | None:
    """A wrapper that has come to its yield; ``None`` where it did not."""
    around: Generator[None, Any, Any] = function(*arguments)
    try:
        next(around)
    except StopIteration:
        fail(RuntimeError("the wrapper did not yield"))
    except Exception as error:
        fail(error)
    else:
        return around
    return None


def _throw(around: Generator[None, Any, Any], error: BaseException, fail: Callable[[Exception], None]) -> Any:
    """Tell a wrapper of an error inside, which is no error of its own.

    Returns:
        What it makes of it, if it takes it for done.
    """
    try:
        around.throw(error)
    except StopIteration as end:
        return end.value
    except Exception as raised:
        # A generator cannot raise StopIteration: Python puts a RuntimeError around it.
        if raised is not error and not (isinstance(error, StopIteration) and raised.__cause__ is error):
            fail(raised)
    else:
        _yielded_twice(around, fail)
    raise error


def _yielded_twice(around: Generator[None, Any, Any], fail: Callable[[Exception], None]) -> None:
    fail(RuntimeError("the wrapper yielded twice"))
    around.close()
