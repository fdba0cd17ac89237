"""Hyperparameters: the arguments of a Module or DataModule, kept without a call."""

from __future__ import annotations

import inspect
import math
import weakref
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from types import FrameType
from typing import Any, Self

#: An object's id -> every argument of its ``__init__``, while the object lives. The object does not
#: hold them: then all of them would have to pickle.
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

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"hparams has no {name!r}; it has {', '.join(self) or 'nothing'}. Without "
            "self.save_hyperparameters() in __init__ it keeps numbers, strings and lists and dicts "
            "of them only"
        )


class HyperparametersMixin:
    """Keeps the arguments of ``__init__`` as :attr:`hparams`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        arguments = _arguments(cls, made, args, kwargs)
        _MADE_WITH[id(made)] = arguments
        weakref.finalize(made, _MADE_WITH.pop, id(made), None).atexit = False
        plain = {name: value for name, value in arguments.items() if _is_plain(value)}
        vars(made)["_hparams"] = HyperParameters(plain)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inherited = _inherited(self, inspect.currentframe())
        made_with = _MADE_WITH.get(id(self), {})
        for name in inherited.keys() - made_with.keys():
            made_with[name] = inherited[name]
            if _is_plain(inherited[name]) and "_hparams" in vars(self):
                self.hparams.setdefault(name, inherited[name])
        super().__init__(*args, **kwargs)

    @property
    def hparams(self) -> HyperParameters:
        """The arguments, with defaults: numbers, strings, and lists and dicts of them.

        After :meth:`save_hyperparameters` it holds the arguments that were saved.
        """
        found: HyperParameters = vars(self).get("_hparams", HyperParameters())
        return found

    def save_hyperparameters(
        self, *names: str | Mapping[str, Any] | Namespace, ignore: str | Iterable[str] = ()
    ) -> None:
        """Keep arguments of any kind in :attr:`hparams`, also objects. Call it in ``__init__``.

        An argument that ``__init__`` has assigned again has its new value. A second call, as in a
        subclass, adds to the first one's. Lightning has the same method.

        Args:
            names: the arguments to keep; default: all. One dict or ``argparse.Namespace`` is kept
                instead of the arguments.
            ignore: names to leave out.

        Raises:
            ValueError: ``__init__`` has no such argument, or a name is no string.
        """
        arguments = {**_MADE_WITH.get(id(self), self.hparams)}
        for call in _constructors(self, inspect.currentframe()):  # a subclass's value wins
            given, values = inspect.getargs(call.f_code).args, call.f_locals
            arguments |= {k: values[k] for k in given if k in arguments and k in values}
        called = type(self).__name__
        if len(names) == 1 and isinstance(names[0], Mapping | Namespace):
            arguments = dict(vars(names[0]) if isinstance(names[0], Namespace) else names[0])
            names = ()
        left_out = [ignore] if isinstance(ignore, str) else list(ignore)
        for name in (*names, *left_out):
            if not isinstance(name, str):
                message = f"{called}.save_hyperparameters was given {type(name).__name__}"
                hint = "names of arguments, or one dict or argparse.Namespace alone"
                raise ValueError(f"{message}. Fix: {hint}")
            if name not in arguments:
                known = ", ".join(arguments) or "none"
                message = f"{called} was not made with an argument {name!r}, but with {known}"
                hint = "use one of these; arguments of **kwargs have other names"
                raise ValueError(f"{message}. Fix: {hint}")
        kept_names = (set(names) or arguments.keys()) - {*left_out}
        kept = {name: value for name, value in arguments.items() if name in kept_names}
        # The first call replaces the arguments that were kept without one.
        before = self.hparams if vars(self).get("_hparams_saved") else {}
        vars(self).update(_hparams=HyperParameters({**before, **kept}), _hparams_saved=True)


def _inherited(made: Any, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments that heirs pass to their parents' ``__init__`` through ``**kwargs``.

    They are read from the calls that are running.
    """
    calls = list(_constructors(made, frame))
    found: dict[str, Any] = {}
    for heir, parent in pairwise(reversed(calls)):
        if not heir.f_code.co_flags & inspect.CO_VARKEYWORDS:
            break
        names, _, keywords, values = inspect.getargvalues(parent)
        arguments = {name: values[name] for name in names[1:]}
        found = {**values.get(keywords or "", {}), **arguments, **found}
    return found


def _constructors(made: Any, frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the running calls of its ``__init__``, that of the most general class first."""
    while frame is not None and (frame := frame.f_back) is not None and _constructs(frame, made):
        yield frame


def _constructs(frame: FrameType, made: Any) -> bool:
    """True if a frame is a call of an ``__init__`` of this object."""
    code = frame.f_code
    if code.co_name != "__init__" or code.co_argcount == 0:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is made


def _arguments(
    cls: type, made: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]  # of the class being made
    try:
        bound = signature.bind(made, *args, **kwargs)
    except TypeError:  # copy and pickle bring their own; __init__ explains a wrong call
        return {}
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
        return type(value) is dict and all(
            isinstance(key, str) and _is_plain(item) for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def hyperparameters(module: Any, data: Any = None) -> dict[str, Any]:
    """Return a module's hyperparameters, and its data's as ``data.NAME``, as JSON can hold them.

    An object is named by its type: its repr may be long, or read a GPU's memory.
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
    # Of a builtin the module may be None.
    return ".".join(filter(None, (named.__module__, named.__qualname__)))
