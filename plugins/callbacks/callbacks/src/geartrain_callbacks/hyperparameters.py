"""``self.save_hyperparameters``: the arguments that an object keeps in its ``hparams``.

A checkpoint holds them too, so that ``load_from_checkpoint`` can make the module again.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import FrameType
from typing import Any

from geartrain import DataModule, Module
from geartrain.plugin_api import not_plain


def save(
    owner: Module | DataModule,
    known: Mapping[str, Any],
    frame: FrameType,
    names: tuple[Any, ...],
    ignore: str | Iterable[str],
) -> None:
    """Keep arguments in ``owner.hparams``; see :meth:`geartrain.Module.save_hyperparameters`.

    Args:
        known: the arguments with which ``owner`` was made.
        frame: the call of ``owner.__init__`` that saves.
        names: the arguments to keep, or one dict or ``argparse.Namespace``.
        ignore: names to leave out.

    Raises:
        ValueError: ``__init__`` has no such argument, or a name is no string.
    """
    calls = list(_constructors(owner, frame))
    arguments = {**_passed_on(calls), **known}
    for call in calls:  # a subclass's value wins
        given, values = inspect.getargs(call.f_code).args, call.f_locals
        arguments |= {name: values[name] for name in given if name in arguments and name in values}
    label = type(owner).__name__
    if len(names) == 1 and isinstance(names[0], Mapping | Namespace):
        whole, names = names[0], ()
        arguments = dict(vars(whole) if isinstance(whole, Namespace) else whole)
        given = vars(owner).get("_hparams_call", ({}, ()))
        # The argument that it is, from which load_from_checkpoint makes the module again.
        same = (n for n in (*given[0], *given[1]) if n in known and known[n] is whole)
        vars(owner)["_hparams_are"] = (next(same, ""), isinstance(whole, Namespace))
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


def description(module: Any) -> dict[str, Any]:
    """Return what a checkpoint holds about a module besides its weights.

    ``hyper_parameters`` has the arguments of ``__init__`` that can be read as data alone, without
    those that ``save_hyperparameters`` ignores. ``module`` has the class, the names of missing
    arguments that are not the default, and of the one that is a Namespace.
    """
    plain, others = getattr(module, "_hparams_call", ({}, ()))
    hparams, whole = getattr(module, "hparams", {}), getattr(module, "_hparams_are", None)
    arguments = {name: hparams.get(name, value) for name, value in plain.items()}
    arguments |= {name: hparams[name] for name in others if name in hparams}
    namespace = ""
    if whole is None:
        arguments = {name: value for name, value in arguments.items() if name in hparams}
    elif whole[0]:
        arguments[whole[0]] = dict(hparams)
        namespace = whole[0] if whole[1] else ""
    arguments = {name: value for name, value in arguments.items() if not_plain(value) is None}
    defaults = inspect.signature(type(module).__init__).parameters
    usual = [n for n, value in plain.items() if n in defaults and value == defaults[n].default]
    missing = [name for name in (*plain, *others) if name not in (*arguments, *usual)]
    made = {"class": type(module).__name__, "missing": missing, "namespace": namespace}
    return {"hyper_parameters": arguments, "module": made}


def _constructors(made: Any, frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the running calls of its ``__init__``, that of the most general class first."""
    while frame is not None and frame.f_code.co_name == "__init__":
        if frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")) is not made:
            break
        yield frame
        frame = frame.f_back


def _passed_on(calls: Sequence[FrameType]) -> dict[str, Any]:
    """Return the arguments that heirs pass to their parents' ``__init__`` through ``**kwargs``."""
    found: dict[str, Any] = {}
    for heir, parent in pairwise(reversed(calls)):
        if not heir.f_code.co_flags & inspect.CO_VARKEYWORDS:
            break
        names, _, keywords, values = inspect.getargvalues(parent)
        arguments = {name: values[name] for name in names[1:]}
        found = {**values.get(keywords or "", {}), **arguments, **found}
    return found
