"""Every name that geartrain reads of a user's class. A near-miss of one is an error, a method of another framework is a warning."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from geartrain.errors import UsageError
from geartrain.errors.hints import hint

#: Methods that a DataModule brings, and a Module beside its ``on_`` methods.
DATA = frozenset(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")) | {"prepare_data", "setup", "teardown"}
_STEPS = frozenset(f"{stage}_step" for stage in ("training", "validation", "test", "predict"))
MODULE = (
    DATA
    | _STEPS
    | {f"{stage}_{end}" for stage in ("training", "validation", "test") for end in ("step_end", "epoch_end")}
    | {"configure_optimizers", "transfer_batch_to_device"}
)
#: Methods of a plugin or callback that are no hooks, of any plugin, and of one kind of plugin.
STATE = frozenset({"state_dict", "load_state_dict"})
_OF_ANY_PLUGIN = STATE | {"diagnose", "more_options"}
_METHODS_OF = {"strategy": {"notes"}, "accelerator": {"unavailable", "device_count", "select_devices"}}


def _are_strings(value: Any) -> bool:
    return isinstance(value, set | frozenset | list | tuple) and bool(value) and all(isinstance(item, str) for item in value)


#: Attributes that are no methods -> whether a value is what geartrain would read there; other values are their author's own.
_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "automatic_optimization": lambda value: isinstance(value, bool),
    "replaces": _are_strings,
    "must_own": _are_strings,
    "errors_are_warnings": lambda value: isinstance(value, bool),
    "same_on_all_ranks": lambda value: isinstance(value, bool),
    "hookspecs": inspect.ismodule,
    "capabilities": lambda value: isinstance(value, Mapping),
    "needs_function": lambda value: isinstance(value, bool),
    "priority": lambda value: isinstance(value, int | float),
    "indexed": lambda value: isinstance(value, bool),
}
_VALUES_OF = {"strategy": {"capabilities", "needs_function"}, "accelerator": {"priority", "indexed"}}
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


def refuse_misspelt(thing: Any, whose: str, methods: Iterable[str], values: Iterable[str] = (), base: type = object) -> None:
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
    reads, values = frozenset(methods), frozenset(values)
    for name, value, space in _own(thing, base):
        if inspect.isroutine(_function(value)):
            meant = None if hasattr(value, "geartrain_impl") else nearly(name, reads)
            is_own = meant is None or meant in space or _is_called(thing, name, base)
            if not is_own and not hint("method", name):  # warn_of_others names the framework that would call it
                raise UsageError(f"{whose}: its {name} would never be called. Did you mean {meant!r}? Fix: rename it")
        elif (meant := nearly(name, values)) is not None and _VALUES[meant](value):
            raise UsageError(f"{whose}: nothing reads its {name} = {value!r}. Did you mean {meant!r}? Fix: rename it")
        elif name == "requires" and "replaces" in values and _are_strings(value):
            raise UsageError(
                f"{whose}: nothing reads its requires = {value!r}. Fix: replaces = {{HOOK}} to own a hook, dependencies in "
                "pyproject.toml, or check_plan to refuse a plan"
            )


def refuse_misspelt_of_plugin(plugin: Any, kind: str, whose: str, hooks: Iterable[str]) -> None:
    """The same for a plugin, strategy or accelerator, with the hooks that there are."""
    methods = {*hooks, *_OF_ANY_PLUGIN, *_METHODS_OF.get(kind, ())}
    refuse_misspelt(plugin, whose, methods, OF_PLUGINS | {"same_on_all_ranks"} | _VALUES_OF.get(kind, set()))
    refuse_half_a_state(plugin, whose)


def refuse_half_a_state(thing: Any, whose: str) -> None:
    """Refuse one of ``state_dict`` and ``load_state_dict`` without the other: checkpoints would leave the state out.

    Raises:
        UsageError: with the method that is missing.
    """
    there = sorted(name for name in STATE if callable(getattr(thing, name, None)))
    if len(there) == 1:
        missing = next(iter(STATE - {*there}))
        raise UsageError(f"{whose}: it has {there[0]} and no {missing}, so no checkpoint would hold its state. Fix: add {missing}")


def warn_of_others(thing: Any, whose: str, fix: str, base: type = object, modules: bool = True) -> None:
    """Warn about methods that another framework would call; vocabularies of ``geartrain.hints`` know their names.

    Args:
        modules: whether methods of a Module and of Lightning's callbacks count too.
    """
    ours = on_methods() | _STEPS if modules else frozenset[str]()
    for name, value, _ in _own(thing, base):
        if not inspect.isroutine(_function(value)) or hasattr(value, "geartrain_impl"):
            continue
        if name in ours or nearly(name, ours) is not None:
            caller = "a Module or a Callback"
        else:
            caller = hint("method", name) if name.startswith("on_") else ""
        if caller and not _is_called(thing, name, base):
            warnings.warn(f"{whose}: its {name} is a method of {caller}, and nothing calls it here. Fix: {fix}", stacklevel=3)


@functools.cache
def on_methods() -> frozenset[str]:
    """Return the names of a Module's own hooks, which a Callback has too."""
    from geartrain.module.module import Module  # not above: planning needs no torch

    return frozenset(name for name in dir(Module) if name.startswith("on_"))


@functools.cache
def nearly(name: str, known: frozenset[str]) -> str | None:
    """Return the known name that ``name`` misspells; ``None`` if it is known itself, or a name of its own.

    It misspells one if it has the same words, but for the spelling of a word, the underscores, or a word of the same meaning.
    """
    if name in known or any(character.isdigit() for character in name):
        return None
    words = name.lower().split("_")
    found = [other for other in known if _is_misspelt(words, other.split("_"))]
    return min(found, default=None, key=lambda other: (-SequenceMatcher(None, name, other).ratio(), other))


def _is_misspelt(words: list[str], known: list[str]) -> bool:
    if "".join(words) == "".join(known):
        return True
    if len(words) != len(known):
        return False
    alike = _ALIKE if len(words) > 1 else _ALIKE_ALONE
    return all(_is_same_word(word, other, alike) for word, other in zip(words, known, strict=True))


def _is_same_word(word: str, known: str, alike: float) -> bool:
    if word == known or sorted(word) == sorted(known) or _SAME.get(word, word) == _SAME.get(known, known):
        return True
    return SequenceMatcher(None, word, known).ratio() > alike


def _own(thing: Any, base: type) -> Iterator[tuple[str, Any, Collection[str]]]:
    """Yield each public attribute that is not geartrain's: its name, its value, and the names beside it."""
    if isinstance(thing, types.ModuleType):
        spaces = [{name: value for name, value in vars(thing).items() if getattr(value, "__module__", thing.__name__) == thing.__name__}]
    else:
        spaces = [dict(vars(cls)) for cls in _classes(thing, base)] + ([] if isinstance(thing, type) else [getattr(thing, "__dict__", {})])
    for space in spaces:
        for name, value in list(space.items()):
            if not name.startswith("_") and not hasattr(base, name):
                yield name, value, space


def _classes(thing: Any, base: type) -> list[type]:
    cls = thing if isinstance(thing, type) else type(thing)
    return [one for one in cls.__mro__ if one not in base.__mro__]


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _is_called(thing: Any, name: str, base: type) -> bool:
    """True if another function of the class, or of the module, uses the name."""
    spaces = [vars(thing)] if isinstance(thing, types.ModuleType) else [vars(cls) for cls in _classes(thing, base)]
    codes = [getattr(inspect.unwrap(_function(one)), "__code__", None) for space in spaces for key, one in space.items() if key != name]
    return any(code is not None and _uses(code, name) for code in codes)


def _uses(code: types.CodeType, name: str) -> bool:
    return name in code.co_names or any(isinstance(part, types.CodeType) and _uses(part, name) for part in code.co_consts)
