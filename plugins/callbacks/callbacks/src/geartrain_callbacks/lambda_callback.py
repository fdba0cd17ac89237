"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geartrain import UsageError
from geartrain.plugin_api import nearest
from geartrain_callbacks.callback import CALLED, NOT_CALLED, Callback


class LambdaCallback(Callback):
    """A callback made of functions, each named after the method that it takes the place of.

    ``LambdaCallback(on_train_epoch_end=lambda trainer, pl_module: print(trainer.current_epoch))``

    Args:
        functions: each gets the arguments of the method of :class:`Callback` with its name.

    Raises:
        UsageError: no function is given, or one that would never be called.

    Source: ``LambdaCallback`` of PyTorch Lightning.
    """

    def __init__(self, **functions: Callable[..., Any]) -> None:
        if not functions:
            message = "LambdaCallback has no function, so it would do nothing"
            raise UsageError(f"{message}. Fix: on_train_epoch_end=lambda trainer, pl_module: ...")
        for name, function in functions.items():
            if name not in CALLED:
                instead = NOT_CALLED.get(name)
                near = f"Use instead: {instead}" if instead else nearest(name, CALLED)
                raise UsageError(f"LambdaCallback: {name} would never be called. {near}")
            if not callable(function):
                raise UsageError(
                    f"LambdaCallback: {name}={function!r} is not a function. "
                    "Fix: use a function or a lambda"
                )
        vars(self).update(functions)
