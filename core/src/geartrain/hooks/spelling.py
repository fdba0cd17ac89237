"""Names that geartrain reads in users' classes, and misspelt or foreign names in their place."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from geartrain.errors import UsageError, warn
from geartrain.errors.hints import hint

_STAGES = ("training", "validation", "test")
_STEPS = frozenset(f"{stage}_step" for stage in (*_STAGES, "predict"))
#: Methods of a DataModule.
DATA = frozenset(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict"))
DATA |= {"prepare_data", "setup", "teardown"}
#: Methods of a Module that replace a part of the training step.
OVERRIDES = frozenset({"backward", "configure_gradient_clipping", "lr_scheduler_step"})
OVERRIDES |= {"optimizer_step", "optimizer_zero_grad"}
#: Methods of a Module, besides its ``on_`` methods.
MODULE = DATA | _STEPS | OVERRIDES | {f"{stage}_epoch_end" for stage in _STAGES}
MODULE |= {f"{stage}_step_end" for stage in _STAGES}
MODULE |= {"configure_callbacks", "configure_optimizers", "transfer_batch_to_device"}
#: Methods of a plugin or callback that are no hooks, of any plugin, and of one kind of plugin.
STATE = frozenset({"state_dict", "load_state_dict"})
_METHODS_OF = {"": STATE | {"diagnose", "more_options"}, "strategy": {"notes"}}
_METHODS_OF["accelerator"] = {"unavailable", "device_count", "select_devices"}

_NAMES = (set, frozenset, list, tuple)
_FLAGS = ("automatic_optimization", "errors_are_warnings", "same_on_all_ranks")
#: Attributes that are no methods -> the type that geartrain reads. A user's value of another type
#: has another purpose.
_VALUES: Mapping[str, Any] = {
    **dict.fromkeys([*_FLAGS, "needs_function", "indexed"], bool),
    **dict.fromkeys(["replaces", "must_own"], _NAMES),
    "hookspecs": types.ModuleType,
    "capabilities": Mapping,
    "priority": int | float,
}
_VALUES_OF = {"strategy": {"capabilities", "needs_function"}}
_VALUES_OF["accelerator"] = {"priority", "indexed"}
#: Attributes that every kind of plugin may have, and a callback may not.
OF_PLUGINS = frozenset({"replaces", "must_own", "errors_are_warnings", "hookspecs"})
#: Different words of one meaning.
_SAME = {"train": "training", "begin": "start", "prediction": "predict"}
_SAME |= dict.fromkeys(["val", "valid", "validate"], "validation")


def check_attributes(
    thing: Any,
    label: str,
    methods: Iterable[str],
    values: Iterable[str] = (),
    base: type = object,
    may_yield: bool = True,
) -> None:
    """Refuse an attribute whose name is almost one that geartrain reads: it would be ignored.

    A method that the class calls is not a misspelling. Nor is one beside the method it resembles.
    If ``methods`` has ``state_dict`` and ``load_state_dict``, one without the other is refused too.

    Args:
        thing: an object, a class, or the module of a plugin file.
        label: of ``thing``, for the error.
        methods: names of the methods that geartrain reads.
        values: names of the other attributes that geartrain reads, among those in ``_VALUES``.
        base: the class of geartrain's that ``thing`` extends; its names are no misspellings.
        may_yield: False if calling a method that yields, or is ``async def``, would run nothing.

    Raises:
        UsageError: a misspelling, half a state, or a method that would run nothing.
    """
    reads, values, spaces = frozenset(methods), frozenset(values), _spaces(thing, base)
    for space, name, value in _public(spaces, base):
        if inspect.isroutine(value):
            meant = None if hasattr(value, "geartrain_impl") else nearly(name, reads)
            is_own = meant is None or meant in space or _is_called(name, spaces)
            # If there is a hint, warn_of_others names the framework that would call it.
            if not is_own and not hint("method", name):
                message = f"would never be called. Did you mean {meant!r}?"
                raise UsageError(f"{label}: its {name} {message} Fix: rename it")
        elif (meant := nearly(name, values)) is not None and isinstance(value, _VALUES[meant]):
            message = f"{label}: nothing reads its {name} = {value!r}"
            raise UsageError(f"{message}. Did you mean {meant!r}? Fix: rename it")
    missing = [name for name in STATE if not callable(getattr(thing, name, None))]
    if len(missing) == 1 and reads >= STATE:
        has = f"it has {min(STATE - {*missing})} and no {missing[0]}"
        message = f"{label}: {has}, so no checkpoint would hold its state"
        raise UsageError(f"{message}. Fix: add {missing[0]}")
    if not may_yield:
        refuse_unrun(thing if isinstance(thing, type) else type(thing), sorted(reads - STATE))


def check_plugin_attributes(plugin: Any, kind: str, label: str, hooks: Iterable[str]) -> None:
    """Refuse misspelt attributes of a plugin, strategy or accelerator; ``hooks`` are all hooks."""
    methods = {*hooks, *_METHODS_OF[""], *_METHODS_OF.get(kind, ())}
    values = OF_PLUGINS | {"same_on_all_ranks"} | _VALUES_OF.get(kind, set())
    check_attributes(plugin, label, methods, values)


def warn_of_others(
    thing: Any, label: str, remedy: str, base: type = object, modules: bool = True
) -> None:
    """Warn about methods that another framework would call, by vocabularies of ``geartrain.hints``.

    Args:
        thing: an object, a class, or the module of a plugin file.
        label: of ``thing``, for the warning.
        remedy: the end of the warning.
        base: the class of geartrain's that ``thing`` extends.
        modules: True if methods of a Module and of a Callback count too.
    """
    known = on_methods() | _STEPS if modules else frozenset[str]()
    spaces = _spaces(thing, base)
    for _, name, value in _public(spaces, base):
        if not inspect.isroutine(value) or hasattr(value, "geartrain_impl"):
            continue
        if name in known or nearly(name, known) is not None:
            caller = "a Module or a Callback"
        else:
            caller = hint("method", name) if name.startswith("on_") else ""
        if caller and not _is_called(name, spaces):
            message = f"{label}: its {name} is a method of {caller}, and nothing calls it here"
            warn(f"{message}. Fix: {remedy}")


def refuse_unrun(cls: type, names: Iterable[str]) -> None:
    """Refuse methods whose call runs nothing: it returns a generator or a coroutine.

    Raises:
        UsageError: one of ``names`` yields or is ``async def``.
    """
    for name in names:
        function, owner = getattr(cls, name, None), f"{cls.__name__}.{name}"
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            message = "is 'async def', and nothing would await it. Fix: write 'def'"
            raise UsageError(f"{owner} {message}")
        if inspect.isgeneratorfunction(function):
            message = "yields, so calling it would run nothing. Fix: take out the 'yield'"
            raise UsageError(f"{owner} {message}")


@functools.cache
def on_methods() -> frozenset[str]:
    """Return the names of a Module's own hooks, which a Callback has too."""
    from geartrain.module.module import Module  # not above: planning needs no torch

    return frozenset(name for name in dir(Module) if name.startswith("on_"))


@functools.cache
def nearly(name: str, known: frozenset[str]) -> str | None:
    """Return the known name that ``name`` misspells; ``None`` for a known or an unrelated name.

    A misspelling may differ in the spelling of words, in underscores, and in words of one meaning.
    """
    if name in known or any(character.isdigit() for character in name):
        return None
    found = get_close_matches(name, sorted(o for o in known if _misspells(name.lower(), o)), 1, 0)
    return found[0] if found else None


def _misspells(name: str, known: str) -> bool:
    words, others = name.split("_"), known.split("_")
    if len(words) != len(others) or "".join(words) == "".join(others):
        return "".join(words) == "".join(others)
    # For one word higher: "steps" is "step" in a name of several, and "launched" is not "launch".
    cutoff = 0.76 if len(words) > 1 else 0.9
    return all(
        _SAME.get(word, word) == _SAME.get(other, other)
        or sorted(word) == sorted(other)  # two letters are exchanged
        or get_close_matches(word, [other], 1, cutoff)
        for word, other in zip(words, others, strict=True)
    )


_Space = dict[str, Any]


def _spaces(thing: Any, base: type) -> list[_Space]:
    """Return the definitions of a module, or of an object and its classes except ``base``."""
    if isinstance(thing, types.ModuleType):
        home, everything = thing.__name__, vars(thing).items()
        return [{n: v for n, v in everything if getattr(v, "__module__", home) == home}]
    cls = thing if isinstance(thing, type) else type(thing)
    of_classes = [dict(vars(ancestor)) for ancestor in cls.__mro__ if ancestor not in base.__mro__]
    return of_classes if cls is thing else [*of_classes, dict(getattr(thing, "__dict__", {}))]


def _public(spaces: Iterable[_Space], base: type) -> Iterator[tuple[_Space, str, Any]]:
    """Yield each public attribute that ``base`` lacks: the space that it is in, name, value."""
    for space in spaces:
        for name, value in space.items():
            if not name.startswith("_") and not hasattr(base, name):
                yield space, name, value


def _is_called(name: str, spaces: Iterable[_Space]) -> bool:
    """True if another function of the class, or of the module, uses the name."""
    values = [value for space in spaces for key, value in space.items() if key != name]
    functions = [inspect.unwrap(value) for value in values if inspect.isroutine(value)]
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    for code in codes:  # the list grows by the functions in functions
        codes.extend(inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    return any(name in code.co_names for code in codes)
