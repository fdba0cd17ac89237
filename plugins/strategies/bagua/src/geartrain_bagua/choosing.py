"""Find algorithms by name, as entry points in ``geartrain_bagua.algorithms``.

Only the chosen one is imported.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from importlib_metadata import EntryPoint

from geartrain import UsageError
from geartrain.plugin_api import Registry, check_attributes, nearest, warn
from geartrain_bagua.algorithm import Algorithm

#: The entry-point group of algorithms, of any distribution.
GROUP = "geartrain_bagua.algorithms"
entry_points = Registry.entry_points
#: The methods of an algorithm that the strategy calls.
_METHODS = frozenset(name for name, thing in vars(Algorithm).items() if inspect.isfunction(thing))


def algorithm_class(given: Any) -> type[Algorithm]:
    """Return the class of an algorithm.

    Args:
        given: a name, a class or an object.

    Raises:
        UsageError: the name is unknown, two distributions claim it, its import fails, or ``given``
            is no algorithm.
    """
    if isinstance(given, Algorithm):
        return type(given)
    cls = _load(_find(given)) if isinstance(given, str) else given
    if not (inspect.isclass(cls) and issubclass(cls, Algorithm)):
        named = f"algorithm {given!r} is {cls!r}"
        raise UsageError(
            f"{named if isinstance(given, str) else f'algorithm={given!r}'}, which is no "
            "geartrain_bagua.Algorithm. Fix: give a name, or a subclass of it, or an object of one"
        )
    return cls


def make_algorithm(given: Any, options: Mapping[str, Any]) -> tuple[str, Algorithm]:
    """Return an algorithm with its options, and its name in checkpoints.

    Raises:
        UsageError: as :func:`algorithm_class`; an option is unknown or has a wrong type.
    """
    if isinstance(given, Algorithm):
        if options:
            raise UsageError(
                f"algorithm={type(given).__name__}(...) is made already, and takes no "
                f"{', '.join(options)}. Fix: pass them to {type(given).__name__}(...)"
            )
        label = f"algorithm {type(given).__name__}"
        check_attributes(given, label, _METHODS, ["capabilities"], Algorithm)
        return _name(type(given)), given
    cls = algorithm_class(given)
    name = _find(given).name if isinstance(given, str) else _name(cls)
    _check_options(cls, name, options)
    check_attributes(cls, f"algorithm {cls.__name__}", _METHODS, ["capabilities"], Algorithm)
    return name, cls(**options)


def refuse_taken(cls: type[Algorithm], strategy: type) -> None:
    """Refuse an algorithm with an option of the strategy, which would never reach the algorithm.

    Raises:
        UsageError: the algorithm has such an option.
    """
    of_strategy = inspect.signature(strategy).parameters
    of_algorithm = inspect.signature(cls).parameters
    taken = [option for option in of_algorithm if option in of_strategy and option != "options"]
    if taken:
        raise UsageError(
            f"{cls.__name__}: its option {taken[0]!r} is also an option of {strategy.__name__}. "
            "Fix: rename it"
        )


def _find(name: str) -> EntryPoint:
    installed = entry_points(group=GROUP)
    hits = [entry_point for entry_point in installed if entry_point.name.lower() == name.lower()]
    if not hits:
        names = sorted({entry_point.name for entry_point in installed})
        hint = nearest(name, names)
        known = f" Known: {', '.join(names)}." if hint.startswith("Did") else ""
        raise UsageError(f"there is no algorithm {name!r}. {hint}{known}")
    preferred = [hit for hit in hits if _label(hit).startswith("geartrain-bagua[")]
    if len(hits) > 1 and preferred:
        others = ", ".join(sorted(_label(hit) for hit in hits if hit not in preferred))
        warn(
            f"algorithm {name!r} is geartrain-bagua's; not used: {others}. "
            "Fix: uninstall the other distribution"
        )
        hits = preferred
    if len(hits) > 1:
        labels = " and ".join(sorted(map(_label, hits)))
        raise UsageError(
            f"algorithm {name!r}: {labels} claim the same name. Fix: uninstall one of them"
        )
    found: EntryPoint = hits[0]
    return found


def _name(cls: type[Algorithm]) -> str:
    """Return the name of a class's entry point, or of the class without one. Imports nothing."""
    for entry_point in sorted(entry_points(group=GROUP), key=lambda entry_point: entry_point.name):
        found: Any = sys.modules.get(entry_point.module)
        for part in (entry_point.attr or "").split("."):
            found = getattr(found, part, None)
        if found is cls:
            return str(entry_point.name)
    return cls.__name__


def _load(entry_point: EntryPoint) -> Any:
    try:
        return entry_point.load()
    except BaseException as error:  # any error, including sys.exit: the user must see the cause
        if isinstance(error, KeyboardInterrupt):
            raise
        cause = f"{type(error).__name__}: {error}"
        hint = "reinstall it"
        if entry_point.dist:
            hint = f"pip install --force-reinstall {entry_point.dist.name}"
        raise UsageError(
            f"algorithm {_label(entry_point)} could not be imported: {cause}. Fix: {hint}"
        ) from error


def _label(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name if entry_point.dist else '?'}[{entry_point.name}]"


# --- options --------------------------------------------------------------------------------------


def _check_options(cls: type[Algorithm], name: str, options: Mapping[str, Any]) -> None:
    """Check options against the typed arguments of the algorithm's ``__init__``."""
    known = inspect.signature(cls).parameters
    known_options = f"Its options: {', '.join(known)}." if known else "It has none."
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option not in known and not takes_any:
            hint = nearest(option, known)
            hint = f" {hint}" if hint.startswith("Did") else ""
            raise UsageError(
                f"the algorithm {name!r} has no option {option!r}.{hint} {known_options}"
            )
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise UsageError(f"the algorithm {name!r}: {error}. {known_options}") from error
    types_of = get_type_hints(cls.__init__)
    for option, value in options.items():
        if option in types_of and not _fits(value, types_of[option]):
            wanted = types_of[option]
            typed = str(wanted).replace("typing.", "")
            typed = wanted.__name__ if inspect.isclass(wanted) else typed
            raise UsageError(
                f"the algorithm {name!r}: {option}={value!r} is no {typed}. {known_options}"
            )


def _fits(value: Any, wanted: Any) -> bool:
    """True if a value is of an annotated type, or if the type cannot be checked."""
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return any(_fits(value, get_arg) for get_arg in get_args(wanted))
    if origin is Literal:
        return value in get_args(wanted)
    if wanted is None or wanted is types.NoneType:
        return value is None
    if not inspect.isclass(wanted):
        return True
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)
