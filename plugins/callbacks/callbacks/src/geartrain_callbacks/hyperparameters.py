"""``self.save_hyperparameters``: the arguments that an object keeps in its ``hparams``."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from geartrain import DataModule, Module


def save(
    owner: Module | DataModule,
    known: Mapping[str, Any],
    calls: Iterable[FrameType],
    names: tuple[Any, ...],
    ignore: str | Iterable[str],
) -> None:
    """Keep arguments in ``owner.hparams``; see :meth:`geartrain.Module.save_hyperparameters`.

    Args:
        known: the arguments with which ``owner`` was made.
        calls: the running calls of ``owner.__init__``, that of the most general class first.
        names: the arguments to keep, or one dict or ``argparse.Namespace``.
        ignore: names to leave out.

    Raises:
        ValueError: ``__init__`` has no such argument, or a name is no string.
    """
    arguments = dict(known)
    for call in calls:  # a subclass's value wins
        given, values = inspect.getargs(call.f_code).args, call.f_locals
        arguments |= {name: values[name] for name in given if name in arguments and name in values}
    label = type(owner).__name__
    if len(names) == 1 and isinstance(names[0], Mapping | Namespace):
        arguments = dict(vars(names[0]) if isinstance(names[0], Namespace) else names[0])
        names = ()
    left_out = [ignore] if isinstance(ignore, str) else list(ignore)
    for name in (*names, *left_out):
        if not isinstance(name, str):
            message = f"{label}.save_hyperparameters was given {type(name).__name__}"
            hint = "names of arguments, or one dict or argparse.Namespace alone"
            raise ValueError(f"{message}. Fix: {hint}")
        if name not in arguments:
            message = f"{label} was not made with an argument {name!r}"
            message = f"{message}, but with {', '.join(arguments) or 'none'}"
            hint = "use one of these; arguments of **kwargs have other names"
            raise ValueError(f"{message}. Fix: {hint}")
    kept_names = (set(names) or arguments.keys()) - {*left_out}
    kept = {name: value for name, value in arguments.items() if name in kept_names}
    # The first call replaces the arguments that were kept without one.
    before = owner.hparams if vars(owner).get("_hparams_saved") else {}
    hparams = type(owner.hparams)({**before, **kept})
    vars(owner).update(_hparams=hparams, _hparams_saved=True)
