"""Replace the functions of hookimpls by functions that measure them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from geartrain.plugin_api import Hooks


def wrap_implementations(
    hooks: Hooks, decorator: Callable[[Callable[..., Any], Any, str, str], Callable[..., Any]]
) -> None:
    """Replace the function of every hookimpl.

    Args:
        decorator: ``(function, impl, hook, label of its plugin)`` -> a function with the same
            arguments and result, or ``function``; that of a wrapper returns a generator.

    Raises:
        UsageError: the hooks are frozen.
    """
    for hook in hooks.names:
        for impl in getattr(hooks.manager.hook, hook).get_hookimpls():
            label = impl.plugin_name.partition(" (")[0]  # the second of a name has a number
            # Freezing takes the owner's own function, which does not check the result.
            found = impl.function, getattr(impl.function, "unchecked", impl.function)
            new, unchecked = (decorator(function, impl, hook, label) for function in found)
            if new is not found[0]:
                functools.update_wrapper(new, found[0])
                new.unchecked = functools.update_wrapper(unchecked, found[1])  # type: ignore[attr-defined]
                impl.function = new
