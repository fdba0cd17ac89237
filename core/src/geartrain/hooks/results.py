"""Check results of hooks: an owner must return one, and a wrapper must not lose it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from types import CodeType
from typing import Any

from pluggy import HookCaller, HookImpl

from geartrain.errors import GeartrainError, TrainingError, UsageError
from geartrain.hooks.checks import result_of, wrapper_form


def require_result(caller: HookCaller, is_owned: bool) -> None:
    """Let the implementations of a hook with a result raise an error if they lose it.

    Args:
        is_owned: True if the hook has one owner, which must return a result.
    """
    returns = result_of(caller)
    owner_must = is_owned and returns and "None" not in returns and returns != "Any"
    # pluggy declares ``function`` final, but reads it at each call.
    for impl in caller.get_hookimpls():
        if impl.wrapper and returns != "None":
            impl.function = _keeping(impl, caller)  # type: ignore[misc]
        elif owner_must and not impl.wrapper:
            impl.function = _returning(impl, caller.name, returns)  # type: ignore[misc]


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an owner's own function, which the loop calls after the hooks are frozen."""
    original: Callable[..., Any] = getattr(function, "unchecked", function)
    return original


def _returning(impl: HookImpl, hook: str, returns: str) -> Callable[..., Any]:
    function = impl.function

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        if result is None:
            message = f"{impl.plugin_name}: its hookimpl {hook!r} returned None"
            raise _lost(hook, message, f"return {returns}")
        return result

    call.unchecked = function  # type: ignore[attr-defined]
    return call


def _keeping(impl: HookImpl, caller: HookCaller) -> Callable[..., Any]:
    function: Callable[..., Any] = impl.function

    @functools.wraps(function)
    def call(*arguments: Any) -> _Wrapper:
        return _Wrapper(function(*arguments), impl, caller)

    return call


class _Wrapper:
    """A wrapper's generator for pluggy; raises if the wrapper makes ``None`` of a result."""

    __slots__ = ("_caller", "_generator", "_impl", "close", "throw")

    def __init__(
        self, generator: Generator[None, Any, Any], impl: HookImpl, caller: HookCaller
    ) -> None:
        self._generator, self._impl, self._caller = generator, impl, caller
        self.throw, self.close = generator.throw, generator.close

    def __next__(self) -> None:
        return next(self._generator)

    def send(self, result: Any) -> None:
        try:
            return self._generator.send(result)
        except StopIteration as end:
            if end.value is not None or result is None:
                raise
        hook, owner = self._caller.name, self._impl.plugin_name
        lost = f"made None of the owner's {type(result).__name__}"
        message = f"{owner}: its wrapper of the hook {hook!r} {lost}"
        raise _lost(hook, message, wrapper_form(self._caller))

    @property
    def gi_code(self) -> CodeType:
        """The code that pluggy names in its own errors."""
        code: CodeType = inspect.unwrap(self._impl.function).__code__
        return code


def _lost(hook: str, message: str, hint: str) -> GeartrainError:
    return (UsageError if hook == "plan_processes" else TrainingError)(f"{message}. Fix: {hint}")
