"""The path to what cannot be pickled."""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from geartrain import UsageError
from geartrain_spawn.files import Pickler


def refusal(belongings: Mapping[str, Any], error: Exception, strategy: str) -> UsageError:
    """The error that names what does not pickle.

    Args:
        belongings: what was handed over, by the name under which the user knows it.
        error: what pickling raised.
        strategy: whose error this is.
    """
    for name, thing in belongings.items():
        if _why_not(thing) is not None:
            path, found, reason = _search(name, thing, set())
            return UsageError(
                f"{strategy}: {path}: {_describe(found)} cannot be pickled, and what goes to another process must be ({reason}). "
                "Fix: make it in setup(), which runs in each process, leave it out in __getstate__, or use --strategy ddp, "
                "which needs no pickling"
            )
    return UsageError(f"{strategy}: the run cannot be pickled: {type(error).__name__}: {error}")


def _why_not(thing: Any) -> str | None:
    try:
        Pickler(_Nowhere(), lambda buffer: None).dump(thing)  # type: ignore[arg-type]
    except Exception as error:  # whatever a __reduce__ or __getstate__ of the user's raises
        return f"{type(error).__name__}: {error}" if not isinstance(error, TypeError) else str(error)
    return None


class _Nowhere:
    """A file that forgets what is written."""

    def write(self, data: Any) -> int:
        return len(data)


def _search(path: str, thing: Any, seen: set[int]) -> tuple[str, Any, str]:
    """The innermost part of ``thing`` that does not pickle: its path, itself, and why."""
    seen.add(id(thing))
    for step, part in _parts(thing):
        if id(part) not in seen and _why_not(part) is not None:
            return _search(path + step, part, seen)
    return path, thing, _why_not(thing) or ""


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """What pickling ``thing`` would pickle, each with the step that leads to it."""
    if isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"[{i}]", value) for i, value in enumerate(thing))
    elif isinstance(thing, types.MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, types.FunctionType):
        yield from _parts_of_function(thing)
    elif inspect.isclass(thing):
        yield from ((f".{name}", value) for name, value in vars(thing).items() if not name.startswith("__") or callable(value))
    else:
        yield from _parts_of_object(thing)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((f" (its variable {name!r})", cell.cell_contents) for name, cell in cells)
    used = [name for name in function.__code__.co_names if name in function.__globals__]
    yield from ((f" (its global {name!r})", function.__globals__[name]) for name in used)
    yield from ((f" (its default {i})", value) for i, value in enumerate(function.__defaults__ or ()))


def _parts_of_object(thing: Any) -> Iterator[tuple[str, Any]]:
    try:
        state = thing.__getstate__()
    except Exception:  # it is this object itself that does not pickle
        return
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, Mapping):
            registered = ("_modules", "_parameters", "_buffers")  # nn.Module's: their names are those that a user types
            for name in registered:
                yield from _attributes(attributes.get(name) or {})
            yield from _attributes({name: value for name, value in attributes.items() if name not in registered})
    yield "'s class", type(thing)


def _attributes(attributes: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    return ((f".{name}", value) for name, value in attributes.items())


def _describe(thing: Any) -> str:
    code = getattr(thing, "__code__", None)
    if code is not None:
        return f"{thing.__name__} at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    cls = type(thing)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
