"""The callbacks of a Session, whose methods the user's loop calls by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from geartrain.plugin_api import warn


class Callbacks:
    """Objects whose methods :meth:`call` calls, in the order given."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects = list(objects)
        self._called = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_objects": self._objects, "_called": True}  # a new process must not warn again

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the method ``name`` of every callback that has one."""
        for callback in self._objects:
            method = getattr(callback, name, None)
            if callable(method):
                self._called = True
                method(*args, **kwargs)

    def warn_if_never_called(self) -> None:
        """Warn at the end of a run if the loop called no callback."""
        if self._objects and not self._called:
            warn(
                "no method of this session's callbacks was called. "
                "Fix: session.call(NAME, ...) at each event of the loop"
            )
