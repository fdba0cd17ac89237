"""The loop's view of the user's module: the StepForwarder that is wrapped, the module's hooks, and checks of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geartrain.errors import TrainingError, UsageError
from geartrain.errors.hints import hint
from geartrain.hooks.spelling import DATA, MODULE, on_methods, refuse_misspelt
from geartrain.module.module import DataModule, Module, overridden
from geartrain.module.nested import map_tensors

#: The methods of a module that a Trainer calls with batches.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")

_ON_LOADERS = {f"on_{stage}_dataloader" for stage in ("train", "val", "test", "predict")}
#: Methods of other frameworks' modules that geartrain would never call; the vocabularies of ``geartrain.hints`` have the replacements.
NOT_CALLED = _ON_LOADERS | {
    *(
        "optimizer_step",
        "optimizer_zero_grad",
        "lr_scheduler_step",
        "backward",
        "configure_gradient_clipping",
        "clip_gradients",
    ),
    *(
        "configure_callbacks",
        "configure_sharded_model",
        "configure_model",
        "on_post_move_to_device",
        "log_grad_norm",
    ),
    *(
        "on_epoch_start",
        "on_epoch_end",
        "on_pretrain_routine_start",
        "on_pretrain_routine_end",
        "on_validation_model_zero_grad",
    ),
    *(
        f"on_{stage}_model_{mode}"
        for stage in ("validation", "test", "predict")
        for mode in ("eval", "train")
    ),
    *("tbptt_split_batch", "predict_step_end", "predict_epoch_end"),
}
#: The same of their data modules.
NOT_CALLED_OF_DATA = _ON_LOADERS | {
    *("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
    *("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint", "on_exception"),
}


class StepForwarder(nn.Module):
    """The module as the strategy wraps it: ``step("training_step", batch, batch_idx)`` calls that method.

    Training must go through the wrapper's ``forward`` (DDP prepares its reducer there); calling ``module.training_step`` past it
    lets the ranks' weights drift apart with no error. This class is what makes ``training_step`` a ``forward``.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        # Decided once: how many of (batch, batch_idx, dataloader_idx) each method takes, and which have a *_step_end.
        self._arity = {
            name: _arity(module, name) for name in STEPS if callable(getattr(module, name, None))
        }
        self._ends = {
            name for name in self._arity if callable(getattr(module, f"{name}_end", None))
        }

    def calls(self, model: nn.Module) -> dict[str, Callable[..., Any]]:
        """Return a function for each step method, decided once.

        Training goes through ``model``, which is this StepForwarder as the strategy wrapped it. If nothing wraps it, and in evaluation,
        a call is the module's own method, without nn.Module's call machinery (1 µs), unless it takes fewer arguments or has a
        ``*_step_end``.
        """

        def direct(method: str) -> Callable[..., Any]:
            full = 2 if method == "training_step" else 3
            if self._arity[method] >= full and method not in self._ends:
                own: Callable[..., Any] = getattr(self.module, method)
                return own
            return partial(self.forward, method)

        calls = {name: direct(name) for name in self._arity}
        if model is not self and "training_step" in calls:
            calls["training_step"] = partial(model, "training_step")
        return calls

    def forward(self, method: str, *args: Any) -> Any:
        output = self.part(method, *args)
        return self.end(method, [output]) if method in self._ends else output

    def part(self, method: str, *args: Any) -> Any:
        """Call a step method on one part of a batch, without its ``*_step_end``."""
        # Straight from the dict: nn.Module's __getattr__ would cost as much as the rest of this method.
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


def nothing(a: Any = None, b: Any = None, c: Any = None, d: Any = None) -> None:
    """Do nothing, in place of a hook that the module does not override; without ``*`` CPython calls it in half the time."""


class ModuleHooks:
    """The module's own hooks as attributes: each a bound method if the subclass overrides it, else :func:`nothing`."""

    def __init__(self, module: Module) -> None:
        #: The outputs of this epoch's training steps, without their graphs, if ``training_epoch_end`` wants it.
        self.outputs: list[Any] = []
        for name in dir(Module):
            if name.startswith("on_"):
                self._set(name, getattr(module, name) if overridden(module, name) else nothing)
        for stage in ("training", "validation", "test", "predict"):
            self._set(f"{stage}_epoch_end", getattr(module, f"{stage}_epoch_end", nothing))
        if self.has("training_epoch_end"):
            self.put_before("on_train_batch_end", lambda output, *_: self.outputs.append(output))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def has(self, *names: str) -> bool:
        """True if the module, or a callback, has one of these hooks."""
        return any(getattr(self, name) is not nothing for name in names)

    def put_before(self, name: str, hook: Callable[..., Any]) -> None:
        """Call ``hook`` before the present method of this name, whose result counts."""
        then = getattr(self, name)

        def both(*arguments: Any) -> Any:
            hook(*arguments)
            return then(*arguments)

        self._set(name, both)

    def _set(self, name: str, hook: Callable[..., Any]) -> None:
        if name == "on_train_batch_end" and hook is not nothing:
            hook = partial(_without_graph, hook)
        setattr(self, name, hook)


def _without_graph(hook: Callable[..., Any], output: Any, *arguments: Any) -> None:
    """Call ``on_train_batch_end`` with a step's output that may be kept: its graph would hold the memory of the whole step."""
    hook(map_tensors(output, torch.Tensor.detach), *arguments)


def check_module(module: Any, command: str) -> None:
    """Refuse a module, or its class, that cannot be run, before anything starts.

    Raises:
        UsageError: no Module, a missing step or optimizer, a method that geartrain would never call.
    """
    cls = module if inspect.isclass(module) else type(module)
    if not issubclass(cls, Module):
        raise UsageError(
            f"{cls.__name__} is not a geartrain.Module. Fix: subclass geartrain.Module, or give Trainer.fit an nn.Module"
        )
    refuse_misspelt(
        module,
        cls.__name__,
        {*MODULE, *on_methods()} - NOT_CALLED,
        ["automatic_optimization"],
        Module,
    )
    step = {
        "fit": "training_step",
        "validate": "validation_step",
        "test": "test_step",
        "predict": "predict_step",
    }[command]
    if not callable(getattr(module, step, None)):
        raise UsageError(f"{cls.__name__} has no {step}, which {command} needs. Fix: define it")
    if (
        command == "fit"
        and getattr(cls, "configure_optimizers", None) is Module.configure_optimizers
    ):
        raise UsageError(
            f"{cls.__name__} has no configure_optimizers. Fix: return an optimizer from it, or None to step nothing"
        )
    for name in (
        *STEPS,
        *(name for name, thing in vars(Module).items() if inspect.isfunction(thing)),
    ):
        _check_method(module, cls, name)
    refuse_unrun(cls, (*STEPS, *(f"{name}_end" for name in STEPS), *vars(Module)))
    # Module's own methods of these names are for manual optimisation, where a subclass may override them.
    own = {
        method
        for method in vars(Module)
        if not module.automatic_optimization or not overridden(module, method)
    }
    _refuse_not_called(cls, "Module", NOT_CALLED - own)


#: Arguments that Lightning gives a step, or gave it once -> the replacement.
_NOT_GIVEN = {
    "optimizer_idx": "automatic_optimization = False in __init__, and self.optimizers() in training_step, see docs/manual-optimisation.md",
    "hiddens": "splitting the sequence in training_step",
    "dataloader_iter": "a batch: def {name}(self, batch, batch_idx)",
}


def _check_method(module: Module | type[Module], cls: type, name: str) -> None:
    """Refuse a method that the loop could not call.

    Raises:
        UsageError: it is no method, or needs other arguments than it gets.
    """
    method = getattr(module, name, None)
    if not callable(method):
        if method is not None or name not in STEPS:
            raise UsageError(
                f"{cls.__name__}.{name} is {method!r} and no method. Fix: define it, or leave it out"
            )
        return
    is_step = name in STEPS
    if not is_step and (not name.startswith(("on_", "transfer_")) or not overridden(module, name)):
        return
    if is_step:
        given, fewest = (
            ["batch", "batch_idx", "dataloader_idx"][: 2 if name == "training_step" else 3],
            0,
        )
    else:
        own = list(inspect.signature(getattr(Module, name)).parameters.values())[1:]
        given, fewest = [p.name for p in own], sum(p.default is p.empty for p in own)
    parameters = _parameters(module, method)
    for argument, instead in _NOT_GIVEN.items():
        if is_step and any(p.name == argument and p.default is p.empty for p in parameters):
            raise UsageError(
                f"{cls.__name__}.{name} takes {argument!r}, which it is not given. Fix: {instead.format(name=name)}"
            )
    if not any(_binds(parameters, count) for count in range(fewest, len(given) + 1)):
        raise UsageError(
            f"{cls.__name__}.{name} takes ({', '.join(map(str, parameters))}) and is called with ({', '.join(given)}). "
            f"Fix: def {name}(self{''.join(f', {argument}' for argument in given)})"
        )


def check_loader_count(module: Module, stage: str, count: int) -> None:
    """Refuse methods that need, or cannot take, the number of the loader.

    Raises:
        TrainingError: one that needs it, and there is one loader; one that cannot take it, and there are several.
    """
    prefix = "validation" if stage == "validate" else stage
    for name, arguments in (
        (f"{prefix}_step", 2),
        (f"on_{prefix}_batch_start", 2),
        (f"on_{prefix}_batch_end", 3),
    ):
        method = getattr(module, name, None)
        if method is None:
            continue
        parameters, given = _parameters(module, method), arguments + (count > 1)
        if not any(
            _binds(parameters, n) for n in range(0 if name.endswith("_step") else given, given + 1)
        ):
            fix = "dataloader_idx=0 as its last argument"
            what = (
                "dataloader_idx, and there is one loader"
                if count == 1
                else f"no dataloader_idx, and there are {count} loaders"
            )
            raise TrainingError(
                f"{type(module).__name__}.{name} takes {what} to {stage}. Fix: {fix}"
            )


def _parameters(
    module: Module | type[Module], method: Callable[..., Any]
) -> list[inspect.Parameter]:
    """A method's parameters without ``self``, which that of a class still has."""
    parameters = list(inspect.signature(method).parameters.values())
    return parameters[1:] if isinstance(module, type) and inspect.isfunction(method) else parameters


def _binds(parameters: list[inspect.Parameter], count: int) -> bool:
    try:
        inspect.Signature(parameters).bind(*[None] * count)
    except TypeError:
        return False
    return True


def refuse_unrun(cls: type, names: Iterable[str]) -> None:
    """Refuse methods whose call runs nothing: Python only makes a generator or a coroutine of it.

    Raises:
        UsageError: one of ``names`` yields or is ``async def``.
    """
    for name in names:
        function = getattr(cls, name, None)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"{cls.__name__}.{name} is 'async def', and nothing would await it. Fix: write 'def'"
            )
        if inspect.isgeneratorfunction(function):
            raise UsageError(
                f"{cls.__name__}.{name} yields, so calling it would run nothing. Fix: take out the 'yield'"
            )


def check_data(data: Any) -> None:
    """Refuse a data module that cannot be used, before anything starts.

    Raises:
        UsageError: no DataModule, or a method that geartrain would never call.
    """
    if not isinstance(data, DataModule):
        raise UsageError(
            f"datamodule={data!r} is not a geartrain.DataModule. Fix: subclass geartrain.DataModule"
        )
    refuse_misspelt(data, type(data).__name__, DATA, base=DataModule)
    for name in ("prepare_data", "setup", "teardown"):
        if not callable(getattr(data, name)):
            raise UsageError(
                f"{type(data).__name__}.{name} is {getattr(data, name)!r} and no method. Fix: define it, or leave it out"
            )
    refuse_unrun(type(data), ("prepare_data", "setup", "teardown"))
    _refuse_not_called(type(data), "DataModule", NOT_CALLED_OF_DATA)


def _refuse_not_called(cls: type, base: str, methods: Iterable[str]) -> None:
    for method in sorted(methods):
        if hasattr(cls, method):
            instead = hint(f"method of {base}", method)
            raise UsageError(
                f"{cls.__name__}.{method} would never be called. "
                + (f"Use instead: {instead}" if instead else "Fix: take it out")
            )
