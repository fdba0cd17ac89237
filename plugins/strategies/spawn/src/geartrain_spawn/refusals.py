"""Find the attribute of a module, of data or of a loader that cannot be pickled, and the reason.

Used by ``ddp_spawn``, ``geartrain doctor --pickle`` and the thread ranks of geartrain-testing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

#: A function like ``pickle.dump``: write an object into a file, or raise.
Dump = Callable[[Any, IO[bytes]], object]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An object that does not pickle, although all of its parts do."""

    #: Path from the user's object: ``"model.transform.lock"``.
    path: str
    #: Its type: ``"_thread.lock"``; for a function its name, file and line.
    what: str
    #: The error of its pickling.
    why: str
    #: True for a function or a class: plain pickle writes its name, and the reader must import it.
    is_name: bool


def refusals(path: str, thing: Any, dump: Dump, by_value: bool = False) -> Iterator[Refusal]:
    """Yield the innermost parts of ``thing`` that ``dump`` cannot write, in the order of pickling.

    Args:
        path: name of ``thing``.
        thing: the object to search.
        dump: writes an object into a file, or raises.
        by_value: true if ``dump`` writes the code of functions and classes that cannot be imported,
            as cloudpickle does. Then the search also covers the objects that they use.
    """
    reason = _why_not(thing, dump)
    if reason is None:
        return
    found = False
    for refusal in _Search(dump, by_value).of(path, thing, reason):
        found = True
        yield refusal
    if not found:  # the object that does not pickle refers to its holder
        yield from _Search(dump, by_value, blame_cycles=True).of(path, thing, reason)


def plain_dump(thing: Any, file: IO[bytes]) -> None:
    """Pickle like the standard library, but skip the memory of tensors, which may be gigabytes."""
    _Plain(file, 5).dump(thing)


class _Plain(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return (
            (int, ())
            if isinstance(obj, torch.UntypedStorage | torch.TypedStorage)
            else NotImplemented
        )


class _Nowhere:
    """A file that discards its content."""

    def write(self, data: Any) -> int:
        return len(data)


def _why_not(thing: Any, dump: Dump) -> str | None:
    try:
        dump(thing, _Nowhere())  # type: ignore[arg-type]
    except Exception as error:  # the user's __reduce__ or __getstate__ may raise anything
        return (
            f"{type(error).__name__}: {error}" if not isinstance(error, TypeError) else str(error)
        )
    return None


@dataclass(frozen=True, slots=True)
class _Search:
    dump: Dump
    by_value: bool
    #: True: report an object even if some of its parts hold it and so do not pickle either.
    blame_cycles: bool = False

    def of(self, path: str, thing: Any, why: str, above: tuple[int, ...] = ()) -> Iterator[Refusal]:
        """Yield the innermost refused parts of ``thing``; ``above``: the ids of its holders."""
        above, innermost = (*above, id(thing)), True
        for step, part in _parts(thing, self.by_value):
            if id(part) in above:
                innermost = innermost and self.blame_cycles
            elif (reason := _why_not(part, self.dump)) is not None:
                innermost = False
                yield from self.of(path + step, part, reason, above)
        if innermost:
            yield Refusal(path, _describe(thing), why, isinstance(thing, type | types.FunctionType))


def _parts(thing: Any, by_value: bool) -> Iterator[tuple[str, Any]]:
    """Yield the parts that pickling ``thing`` would pickle, each with its step of the path."""
    if isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"[{i}]", value) for i, value in enumerate(thing))
    elif isinstance(thing, types.MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, types.FunctionType):
        yield from _parts_of_function(thing) if by_value else ()
    elif inspect.isclass(thing):
        members = vars(thing).items() if by_value else ()
        yield from (
            (f".{name}", value)
            for name, value in members
            if not name.startswith("__") or callable(value)
        )
    else:
        yield from _parts_of_object(thing)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield f" (its variable {name!r})", cell.cell_contents
    used = [name for name in function.__code__.co_names if name in function.__globals__]
    yield from ((f" (its global {name!r})", function.__globals__[name]) for name in used)
    yield from (
        (f" (its default {i})", value) for i, value in enumerate(function.__defaults__ or ())
    )
    yield from (
        (f" (its default {name!r})", value)
        for name, value in (function.__kwdefaults__ or {}).items()
    )


def _parts_of_object(thing: Any) -> Iterator[tuple[str, Any]]:
    try:
        state = thing.__getstate__()
    except Exception:  # this object itself does not pickle
        return
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, Mapping):
            # nn.Module's dictionaries: the user accesses their items as attributes.
            registered = ("_modules", "_parameters", "_buffers")
            for name in registered:
                yield from _attributes(attributes.get(name) or {})
            yield from _attributes(
                {name: value for name, value in attributes.items() if name not in registered}
            )
    try:
        thing.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    except Exception:  # the object does not pickle (a lock, for example), not its class
        return
    yield "'s class", type(thing)


def _attributes(attributes: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    return ((f".{name}", value) for name, value in attributes.items())


def _describe(thing: Any) -> str:
    code = getattr(thing, "__code__", None)
    if code is not None:
        return f"{thing.__name__} at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    cls = thing if isinstance(thing, type) else type(thing)
    name = (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )
    return f"class {name}" if isinstance(thing, type) else name
