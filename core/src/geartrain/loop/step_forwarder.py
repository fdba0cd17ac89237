"""The user's module in the loop: the StepForwarder that is wrapped, and checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from geartrain.errors import TrainingError, UsageError
from geartrain.errors.hints import hint
from geartrain.hooks.spelling import (
    DATA,
    MODULE,
    OVERRIDES,
    STATE,
    check_attributes,
    on_methods,
    refuse_unrun,
)
from geartrain.module.module import DataModule, Module, overridden

#: The methods of a module that a Trainer calls with batches.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class StepForwarder(nn.Module):
    """The module that a strategy wraps. ``forward(name, batch, batch_idx)`` calls a step method.

    Training must call the wrapper's ``forward``, in which DDP prepares its reducer. A direct call
    of ``module.training_step`` raises no error, but ranks would get different weights. This class
    makes ``training_step`` a ``forward``.

    Args:
        module: the user's module.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        #: True if a plugin implements ``wrap_model``; it may return this object, with hooks.
        self.wrapped = False
        # How many of (batch, batch_idx, dataloader_idx) each method takes, and which have an end.
        has = [name for name in STEPS if callable(getattr(module, name, None))]
        self._arity = {name: _arity(module, name) for name in has}
        self._ends = {name for name in has if callable(getattr(module, f"{name}_end", None))}

    def calls(self, model: nn.Module) -> dict[str, Callable[..., Any]]:
        """Return a function for each step method.

        ``training_step`` is a call of ``model``, this StepForwarder as the strategy wrapped it.
        Other functions call this StepForwarder, on which a wrapper in place has put its hooks. If
        no plugin implements ``wrap_model``, they are the module's own methods, which saves
        nn.Module's call machinery (1 µs); but not if a method takes fewer arguments or has a
        ``*_step_end``.
        """

        def direct(method: str) -> Callable[..., Any]:
            full = 2 if method == "training_step" else 3
            if self.wrapped or self._arity[method] < full or method in self._ends:
                return partial(self, method)
            method_of_module: Callable[..., Any] = getattr(self.module, method)
            return method_of_module

        calls = {name: direct(name) for name in self._arity}
        if model is not self and "training_step" in calls:
            calls["training_step"] = partial(model, "training_step")
        return calls

    def forward(self, method: str, *args: Any) -> Any:
        """Call a step method and its ``*_step_end``."""
        output = self.part(method, *args)
        return self.end(method, [output]) if method in self._ends else output

    def part(self, method: str, *args: Any) -> Any:
        """Call a step method on one part of a batch, without its ``*_step_end``."""
        # From the dict: nn.Module's __getattr__ would cost as much as the rest of this method.
        return getattr(self._modules["module"], method)(*args[: self._arity[method]])

    def has_end(self, method: str) -> bool:
        """True if the module has a ``*_step_end`` for this method."""
        return method in self._ends

    def end(self, method: str, outputs: list[Any]) -> Any:
        """Give one output for each part of a batch to the module's ``*_step_end``."""
        return getattr(self._modules["module"], f"{method}_end")(outputs)


def _arity(module: Module, method: str) -> int:
    parameters = inspect.signature(getattr(module, method)).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 3
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def check_module(module: Any, command: str, datamodule: Any = None) -> None:
    """Refuse a module, or its class, that cannot be run, before anything starts; and its data.

    Raises:
        UsageError: no Module, a missing step or optimizer, a method that geartrain never calls.
    """
    if datamodule is not None:
        check_data(datamodule)
    cls = module if inspect.isclass(module) else type(module)
    if not issubclass(cls, Module):
        raise UsageError(
            f"{cls.__name__} is not a geartrain.Module. "
            "Fix: subclass geartrain.Module, or give Trainer.fit an nn.Module"
        )
    reads = {*MODULE, *on_methods()}
    check_attributes(module, cls.__name__, reads, ["automatic_optimization"], Module)
    step = STEPS[("fit", "validate", "test", "predict").index(command)]
    if not callable(getattr(module, step, None)):
        raise UsageError(f"{cls.__name__} has no {step}, which {command} needs. Fix: define it")
    forward = getattr(module, "forward", None)
    unwritten = getattr(forward, "__func__", forward) is nn.Module.forward
    if step == "predict_step" and unwritten and not overridden(module, step):
        message = f"{cls.__name__} has neither predict_step nor forward, which predict needs"
        raise UsageError(f"{message}. Fix: define one of them")
    makes_optimizers = getattr(cls, "configure_optimizers", None)
    if command == "fit" and makes_optimizers is Module.configure_optimizers:
        remedy = "return an optimizer from it, or None to step nothing"
        raise UsageError(f"{cls.__name__} has no configure_optimizers. Fix: {remedy}")
    methods = [name for name, thing in vars(Module).items() if inspect.isfunction(thing)]
    for name in (*STEPS, *methods):
        _check_method(module, cls, name)
    refuse_unrun(cls, (*STEPS, *(f"{name}_end" for name in STEPS), *vars(Module)))
    manual = not module.automatic_optimization
    # Of Module's own methods of manual optimisation only then: a subclass may override them.
    _refuse_not_called(cls, Module, () if manual else ("clip_gradients",))
    for name in sorted(OVERRIDES - {"backward"}):
        if command == "fit" and manual and overridden(module, name):
            message = (
                f"{cls.__name__}.{name} would never be called: automatic_optimization is False"
            )
            raise UsageError(f"{message}. Fix: do it in training_step, and remove the method")


def _check_method(module: Module | type[Module], cls: type, name: str) -> None:
    """Refuse a method that the loop could not call.

    Raises:
        UsageError: it is no method, or needs other arguments than it gets.
    """
    method = getattr(module, name, None)
    if not callable(method):
        if method is not None or name not in STEPS:
            message = f"{cls.__name__}.{name} is {method!r} and no method"
            raise UsageError(f"{message}. Fix: define it, or leave it out")
        return
    is_step = name in STEPS
    called = is_step or name.startswith(("on_", "transfer_", "configure_o")) or name in OVERRIDES
    if not called or (not is_step and not overridden(module, name)):
        return
    if is_step:
        count = 2 if name == "training_step" else 3
        given, fewest = ["batch", "batch_idx", "dataloader_idx"][:count], 0
    else:
        expected = list(inspect.signature(getattr(Module, name)).parameters.values())[1:]
        expected = [p for p in expected if p.kind is p.POSITIONAL_OR_KEYWORD]  # backward has *args
        given = [p.name for p in expected]
        fewest = len(expected) if name in OVERRIDES else sum(p.default is p.empty for p in expected)
    parameters = _parameters(module, method)
    needed = [p.name for p in parameters if p.default is p.empty or not is_step]
    unknown = [argument for argument in needed if argument not in given]
    # Another argument could be bound to one that another framework gives, as a closure to an index.
    foreign = {n: text for n in unknown if (text := hint(f"argument of {name}", n))}
    for argument, instead in foreign.items() if is_step else ():
        message = f"{cls.__name__}.{name} takes {argument!r}, which it is not given"
        raise UsageError(f"{message}. Fix: {instead}")
    if foreign or not any(_binds(parameters, n) for n in range(fewest, len(given) + 1)):
        takes, gets = ", ".join(map(str, parameters)), ", ".join(given)
        raise UsageError(
            f"{cls.__name__}.{name} takes ({takes}) and is called with ({gets}). "
            f"Fix: def {name}({', '.join(['self', *given])})"
        )


def check_loader_count(module: Module, stage: str, count: int) -> None:
    """Refuse methods whose argument ``dataloader_idx`` does not fit the number of loaders.

    Raises:
        TrainingError: a method needs it, and there is one loader; or it lacks it, with several.
    """
    prefix = "validation" if stage == "validate" else stage
    counts = {f"{prefix}_step": 2, f"on_{prefix}_batch_start": 2, f"on_{prefix}_batch_end": 3}
    for name, arguments in counts.items():
        method = getattr(module, name, None)
        if method is None:
            continue
        parameters, given = _parameters(module, method), arguments + (count > 1)
        fewest = 0 if name.endswith("_step") else given
        if not any(_binds(parameters, n) for n in range(fewest, given + 1)):
            message = f"no dataloader_idx, and there are {count} loaders"
            message = "dataloader_idx, and there is one loader" if count == 1 else message
            raise TrainingError(
                f"{type(module).__name__}.{name} takes {message} to {stage}. "
                "Fix: dataloader_idx=0 as its last argument"
            )


def _parameters(
    module: Module | type[Module], method: Callable[..., Any]
) -> list[inspect.Parameter]:
    """Return a method's parameters without ``self``, which a class's function has."""
    parameters = list(inspect.signature(method).parameters.values())
    return parameters[1:] if isinstance(module, type) and inspect.isfunction(method) else parameters


def _binds(parameters: list[inspect.Parameter], count: int) -> bool:
    try:
        inspect.Signature(parameters).bind(*[None] * count)
    except TypeError:
        return False
    return True


def check_data(data: Any) -> None:
    """Refuse a data module that cannot be used, before anything starts.

    Raises:
        UsageError: no DataModule, or a method that geartrain would never call.
    """
    if isinstance(data, type) and issubclass(data, DataModule):
        raise UsageError(f"datamodule={data.__name__} is a class. Fix: {data.__name__}(...)")
    if not isinstance(data, DataModule):
        message = f"datamodule={data!r} is not a geartrain.DataModule"
        raise UsageError(f"{message}. Fix: subclass geartrain.DataModule")
    check_attributes(data, type(data).__name__, DATA | STATE, base=DataModule)
    for name in ("prepare_data", "setup", "teardown"):
        if not callable(getattr(data, name)):
            message = f"{type(data).__name__}.{name} is {getattr(data, name)!r} and no method"
            raise UsageError(f"{message}. Fix: define it, or leave it out")
    refuse_unrun(type(data), ("prepare_data", "setup", "teardown"))
    _refuse_not_called(type(data), DataModule)


def _refuse_not_called(cls: type, base: type, also: Iterable[str] = ()) -> None:
    """Refuse methods that another framework would call, by vocabularies of ``geartrain.hints``.

    Args:
        base: Module or DataModule, whose own methods are not looked up.
        also: those that are.
    """
    names = {name for name in dir(cls) if not (name.startswith("_") or hasattr(base, name))}
    for name in sorted(names | {name for name in also if overridden(cls, name)}):
        if callable(getattr(cls, name)) and (instead := hint(f"method of {base.__name__}", name)):
            message = f"{cls.__name__}.{name} would never be called"
            raise UsageError(f"{message}. Use instead: {instead}")
