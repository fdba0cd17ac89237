"""Hyperparameters: what a Module or DataModule was made with, kept without its author's doing."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Self

#: An object's id -> every argument of its ``__init__``, as long as it lives; not in the object, where all of them would have to pickle.
_MADE_WITH: dict[int, dict[str, Any]] = {}


class HyperParameters(dict[str, Any]):
    """Arguments by name; ``hparams.lr`` is ``hparams["lr"]``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"hparams has no {name!r}; it has {', '.join(self) or 'nothing'}. Without self.save_hyperparameters() in __init__ it keeps "
            "numbers, strings and lists and dicts of them only"
        )


class MadeWith:
    """Keeps the arguments of ``__init__`` as :attr:`hparams`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        arguments = _arguments(cls, made, args, kwargs)
        _MADE_WITH[id(made)] = arguments
        weakref.finalize(made, _MADE_WITH.pop, id(made), None).atexit = False
        vars(made)["_hparams"] = HyperParameters({name: value for name, value in arguments.items() if _is_plain(value)})
        return made

    @property
    def hparams(self) -> HyperParameters:
        """What it was made with, defaults included: numbers, strings, and lists and dicts of them; after :meth:`save_hyperparameters`
        whatever that kept."""
        found: HyperParameters = vars(self).get("_hparams", HyperParameters())
        return found

    def save_hyperparameters(self, *names: str, ignore: str | Iterable[str] = ()) -> None:
        """Keep arguments of any kind in :attr:`hparams`, objects too; called in ``__init__``, as in Lightning.

        Args:
            names: the arguments to keep; all, where none is named.
            ignore: arguments to leave out.

        Raises:
            ValueError: there is no such argument.
        """
        arguments = _MADE_WITH.get(id(self), dict(self.hparams))
        left_out = [ignore] if isinstance(ignore, str) else list(ignore)
        for name in (*names, *left_out):
            if name not in arguments:
                raise ValueError(f"{type(self).__name__} was not made with an argument {name!r}, but with {', '.join(arguments) or 'none'}")
        kept = {name: value for name, value in arguments.items() if (not names or name in names) and name not in left_out}
        vars(self)["_hparams"] = HyperParameters(kept)


def _arguments(cls: type, made: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]  # of the very class that is being made
    try:
        bound = signature.bind(made, *args, **kwargs)
    except TypeError:
        return {}  # made by copy or pickle, which bring their own; or wrongly, which __init__ says better
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def hyperparameters(module: Any, data: Any = None) -> dict[str, Any]:
    """A module's hyperparameters, and its data's as ``data.NAME``, as JSON can hold them.

    An object stands there by its type's name: its repr may be long, or read a GPU's memory.
    """
    found = dict(getattr(module, "hparams", {}))
    found |= {f"data.{name}": value for name, value in getattr(data, "hparams", {}).items()}
    return {name: _as_json(value) for name, value in found.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    return ".".join(filter(None, (named.__module__, named.__qualname__)))  # of a builtin the module may be None
