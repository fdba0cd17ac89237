"""Hyperparameters: the arguments of a Module or DataModule, kept without a call."""

from __future__ import annotations

import inspect
import sys
import weakref
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any, Self

from geartrain.errors.distributions import import_from
from geartrain.module.nested import not_plain

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
        _MADE_WITH[id(made)] = arguments = _arguments(cls, made, args, kwargs)
        weakref.finalize(made, _MADE_WITH.pop, id(made), None).atexit = False
        types = (bool, int, float, str)
        plain = {name: v for name, v in arguments.items() if not_plain(v, types) is None}
        # A checkpoint cannot hold the others.
        defaults = {n: p.default for n, p in inspect.signature(cls.__init__).parameters.items()}
        others = [n for n, v in arguments.items() if n not in plain and v is not defaults.get(n)]
        vars(made).update(_hparams=HyperParameters(plain), _hparams_call=(plain, others))
        return made

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
        saving = import_from("geartrain_callbacks.hyperparameters", "self.save_hyperparameters")
        known = _MADE_WITH.get(id(self), self.hparams)
        saving.save(self, known, sys._getframe(1), names, ignore)


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
