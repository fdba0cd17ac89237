"""Every name that geartrain reads of a user's class. A near-miss of one is an error, a method of another framework is a warning."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from geartrain.errors import UsageError
from geartrain.errors.hints import hint

#: Methods that a DataModule brings, and a Module beside its ``on_`` methods.
DATA = frozenset(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")) | {
    "prepare_data",
    "setup",
    "teardown",
}
_STEPS = frozenset(f"{stage}_step" for stage in ("training", "validation", "test", "predict"))
MODULE = (
    DATA
    | _STEPS
    | {
        f"{stage}_{end}"
        for stage in ("training", "validation", "test")
        for end in ("step_end", "epoch_end")
    }
    | {"configure_optimizers", "transfer_batch_to_device"}
)
#: Methods of a plugin or callback that are no hooks, of any plugin, and of one kind of plugin.
STATE = frozenset({"state_dict", "load_state_dict"})
_OF_ANY_PLUGIN = STATE | {"diagnose", "more_options"}
_METHODS_OF = {
    "strategy": {"notes"},
    "accelerator": {"unavailable", "device_count", "select_devices"},
}


_NAMES = (set, frozenset, list, tuple)
#: Attributes that are no methods -> the type that geartrain would read there; a value of another type is its author's own.
_VALUES: Mapping[str, Any] = {
    **dict.fromkeys(
        [
            "automatic_optimization",
            "errors_are_warnings",
            "same_on_all_ranks",
            "needs_function",
            "indexed",
        ],
        bool,
    ),
    **dict.fromkeys(["replaces", "must_own"], _NAMES),
    "hookspecs": types.ModuleType,
    "capabilities": Mapping,
    "priority": int | float,
}
_VALUES_OF = {
    "strategy": {"capabilities", "needs_function"},
    "accelerator": {"priority", "indexed"},
}
#: Attributes that every kind of plugin may have, and a callback may not.
OF_PLUGINS = frozenset({"replaces", "must_own", "errors_are_warnings", "hookspecs"})

#: Different words of one meaning.
_SAME = {
    "train": "training",
    "val": "validation",
    "valid": "validation",
    "validate": "validation",
    "begin": "start",
    "prediction": "predict",
}
#: Two words of which more than this is the same are one word and its misspelling: "steps" and "step" are, "text" and "test" are not.
_ALIKE = 0.75
#: The same for a name of one word, which says less: "replace" is "replaces", and "launched" is not "launch".
_ALIKE_ALONE = 0.9


def refuse_misspelt(
    thing: Any, whose: str, methods: Iterable[str], values: Iterable[str] = (), base: type = object
) -> None:
    """Refuse an attribute whose name is almost one that geartrain reads: it would be ignored.

    A method that the class itself calls is its author's own, and so is one beside the method that it resembles.

    Args:
        thing: an object, a class, or the module of a plugin file.
        whose: its label, for the error.
        methods: names of the methods that geartrain reads.
        values: names of the other attributes that it reads, of those in ``_VALUES``.
        base: the class of geartrain's that ``thing`` extends; what that has is no misspelling.

    Raises:
        UsageError: with the name meant.
    """
    reads, values, spaces = frozenset(methods), frozenset(values), _spaces(thing, base)
    for space, name, value in _public(spaces, base):
        if inspect.isroutine(value):
            meant = None if hasattr(value, "geartrain_impl") else nearly(name, reads)
            is_own = meant is None or meant in space or _is_called(name, spaces)
            if not is_own and not hint(
                "method", name
            ):  # warn_of_others names the framework that would call it
                raise UsageError(
                    f"{whose}: its {name} would never be called. Did you mean {meant!r}? Fix: rename it"
                )
        elif (meant := nearly(name, values)) is not None and isinstance(value, _VALUES[meant]):
            raise UsageError(
                f"{whose}: nothing reads its {name} = {value!r}. Did you mean {meant!r}? Fix: rename it"
            )
        elif name == "requires" and "replaces" in values and isinstance(value, _NAMES):
            raise UsageError(
                f"{whose}: nothing reads its requires = {value!r}. Fix: replaces = {{HOOK}} to own a hook, dependencies in "
                "pyproject.toml, or check_plan to refuse a plan"
            )


def refuse_misspelt_of_plugin(plugin: Any, kind: str, whose: str, hooks: Iterable[str]) -> None:
    """The same for a plugin, strategy or accelerator, with the hooks that there are."""
    methods = {*hooks, *_OF_ANY_PLUGIN, *_METHODS_OF.get(kind, ())}
    refuse_misspelt(
        plugin, whose, methods, OF_PLUGINS | {"same_on_all_ranks"} | _VALUES_OF.get(kind, set())
    )
    refuse_half_a_state(plugin, whose)


def refuse_half_a_state(thing: Any, whose: str) -> None:
    """Refuse one of ``state_dict`` and ``load_state_dict`` without the other: checkpoints would leave the state out.

    Raises:
        UsageError: with the method that is missing.
    """
    there = sorted(name for name in STATE if callable(getattr(thing, name, None)))
    if len(there) == 1:
        missing = next(iter(STATE - {*there}))
        raise UsageError(
            f"{whose}: it has {there[0]} and no {missing}, so no checkpoint would hold its state. Fix: add {missing}"
        )


def warn_of_others(
    thing: Any, whose: str, fix: str, base: type = object, modules: bool = True
) -> None:
    """Warn about methods that another framework would call; vocabularies of ``geartrain.hints`` know their names.

    Args:
        modules: whether methods of a Module and of Lightning's callbacks count too.
    """
    ours = on_methods() | _STEPS if modules else frozenset[str]()
    spaces = _spaces(thing, base)
    for _, name, value in _public(spaces, base):
        if not inspect.isroutine(value) or hasattr(value, "geartrain_impl"):
            continue
        if name in ours or nearly(name, ours) is not None:
            caller = "a Module or a Callback"
        else:
            caller = hint("method", name) if name.startswith("on_") else ""
        if caller and not _is_called(name, spaces):
            warnings.warn(
                f"{whose}: its {name} is a method of {caller}, and nothing calls it here. Fix: {fix}",
                stacklevel=3,
            )


@functools.cache
def on_methods() -> frozenset[str]:
    """Return the names of a Module's own hooks, which a Callback has too."""
    from geartrain.module.module import Module  # not above: planning needs no torch

    return frozenset(name for name in dir(Module) if name.startswith("on_"))


@functools.cache
def nearly(name: str, known: frozenset[str]) -> str | None:
    """Return the known name that ``name`` misspells; ``None`` if it is known itself, or an unrelated name.

    It misspells one if it has the same words, but for the spelling of a word, the underscores, or a word of the same meaning.
    """
    if name in known or any(character.isdigit() for character in name):
        return None
    found = [other for other in known if _misspells(name.lower(), other)]
    return min(
        found, default=None, key=lambda other: (-SequenceMatcher(None, name, other).ratio(), other)
    )


def _misspells(name: str, known: str) -> bool:
    words, others = name.split("_"), known.split("_")
    if len(words) != len(others):
        return "".join(words) == "".join(others)
    alike = _ALIKE if len(words) > 1 else _ALIKE_ALONE
    return all(
        sorted(word) == sorted(other)
        or _SAME.get(word, word) == _SAME.get(other, other)
        or SequenceMatcher(None, word, other).ratio() > alike
        for word, other in zip(words, others, strict=True)
    )


_Space = dict[str, Any]


def _spaces(thing: Any, base: type) -> list[_Space]:
    """Return the definitions of a module, or of an object and each of its classes, without those of ``base``."""
    if isinstance(thing, types.ModuleType):
        return [
            {
                name: value
                for name, value in vars(thing).items()
                if getattr(value, "__module__", thing.__name__) == thing.__name__
            }
        ]
    cls = thing if isinstance(thing, type) else type(thing)
    of_classes = [dict(vars(one)) for one in cls.__mro__ if one not in base.__mro__]
    return of_classes if cls is thing else [*of_classes, dict(getattr(thing, "__dict__", {}))]


def _public(spaces: Iterable[_Space], base: type) -> Iterator[tuple[_Space, str, Any]]:
    """Yield each public attribute that is not geartrain's: the names beside it, its name, and its value."""
    for space in spaces:
        yield from (
            (space, name, value)
            for name, value in space.items()
            if not name.startswith("_") and not hasattr(base, name)
        )


def _is_called(name: str, spaces: Iterable[_Space]) -> bool:
    """True if another function of the class, or of the module, uses the name."""
    functions = [
        inspect.unwrap(value)
        for space in spaces
        for key, value in space.items()
        if key != name and inspect.isroutine(value)
    ]
    return any(
        _uses(function.__code__, name) for function in functions if hasattr(function, "__code__")
    )


def _uses(code: types.CodeType, name: str) -> bool:
    return name in code.co_names or any(
        isinstance(part, types.CodeType) and _uses(part, name) for part in code.co_consts
    )
