"""``--optimizer CLASS`` and ``--lr_scheduler CLASS``: optimizers chosen on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from geartrain import Module
from geartrain.plugin_api import warn
from geartrain_cli.target import import_class

#: The options -> the argument of their classes that is made here, and their help.
OPTIONS = {
    "optimizer": ("params", "the optimizer's class, in place of configure_optimizers"),
    "lr_scheduler": ("optimizer", "the class of its learning-rate scheduler"),
}


class ChosenOptimizer(Module):
    """A module whose optimizer was chosen by options. :func:`with_optimizer` makes subclasses."""

    _made_by: Any = None
    _scheduled_by: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = self._made_by(self.parameters())
        if self._scheduled_by is None:
            return optimizer
        return [optimizer], [self._scheduled_by(optimizer)]

    def __reduce__(self) -> tuple[Any, ...]:
        # The class exists in no module: another process makes it again.
        return _empty, (type(self).__mro__[2],), self.__dict__


def with_optimizer(cls: type[Module]) -> type[Module]:
    """Return a subclass of the user's class that looks like it and has a chosen optimizer."""
    if cls.configure_optimizers is not Module.configure_optimizers:
        warn(f"--optimizer is used in place of {cls.__name__}.configure_optimizers")
    return _subclass(cls)


def _subclass(cls: type[Module]) -> type[Module]:
    names = ("__module__", "__qualname__", "__doc__")
    return type(cls.__name__, (ChosenOptimizer, cls), {name: getattr(cls, name) for name in names})


def _empty(cls: type[Module]) -> Module:
    made = _subclass(cls)
    empty: Module = made.__new__(made)
    return empty


def add_options(parser: ArgumentParser) -> None:
    """Add both options to a parser."""
    import torch

    bases: dict[str, Any] = {
        "optimizer": torch.optim.Optimizer,
        "lr_scheduler": (
            torch.optim.lr_scheduler.LRScheduler,
            torch.optim.lr_scheduler.ReduceLROnPlateau,
        ),
    }
    for option, (skipped, text) in OPTIONS.items():
        parser.add_subclass_arguments(
            bases[option], option, skip={skipped}, instantiate=False, required=False, help=text
        )


def choose(model: Module, values: Mapping[str, Any] | Namespace) -> None:
    """Give a module of a subclass of ``ChosenOptimizer`` the functions that make its optimizer."""
    made_by, scheduled_by = (_function(values.get(option)) for option in OPTIONS)
    vars(model).update(_made_by=made_by, _scheduled_by=scheduled_by)


def _function(chosen: Any) -> Any:
    if chosen is None:
        return None
    cls: Any = import_class(chosen.class_path)
    arguments = chosen.get("init_args")
    return partial(cls, **(arguments.as_dict() if arguments else {}))
