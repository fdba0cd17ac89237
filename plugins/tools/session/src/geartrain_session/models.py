"""The models that a Session returns, which fire hooks, and the module that hooks see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geartrain import Module, Plan, UsageError
from geartrain.plugin_api import OVERRIDES, map_tensors, overridden, warn

if TYPE_CHECKING:
    from geartrain import Run
    from geartrain_session.session_run import SessionRun


class Called(nn.Module):
    """The model that a strategy wraps: ``called("forward", (args, kwargs))``.

    A Trainer's strategy gets ``StepForwarder(module)`` instead. The inputs are one argument, so
    that a strategy which splits a batch splits all inputs.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        return self.part(method, inputs)

    def part(self, method: str, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Call a method of the module; its ``forward`` runs nn.Module's hooks."""
        # From the dict: nn.Module's __getattr__ would cost as much as the rest of this method.
        module: Any = self._modules["module"]
        return (module if method == "forward" else getattr(module, method))(*inputs[0], **inputs[1])

    def has_end(self, method: str) -> bool:
        """Return False: a Session calls no ``*_step_end``."""
        return False


@dataclass(slots=True)
class Calls:
    """A counter of a model's calls. Not in the nn.Module, whose attributes take 1 us to set."""

    #: Calls whose backward reduces gradients: all calls outside of ``no_backward_sync``.
    reducing: int = 0
    #: True inside ``no_backward_sync``.
    held: bool = False


class SessionModel(nn.Module):
    """A model in a Session: a call runs the ``forward`` hook, with precision and strategy.

    Attributes, parameters and ``state_dict`` are the model's. A copy or a pickle has only the
    model.

    Args:
        session_run: the run of the session.
        run: a copy of its run, with only this model.
        module: the user's model.
        methods: the methods, besides ``forward``, that run the hook.
    """

    def __init__(
        self, session_run: SessionRun, run: Run, module: nn.Module, methods: Iterable[str]
    ) -> None:
        super().__init__()
        self._session_run, self._run = session_run, run
        self._methods: dict[str, Callable[..., Any]] = {}
        self._calls = Calls()
        # Under autocast, outputs have 16 bits. A loss that is computed from them outside of the
        # model would have 16 bits as well.
        self._mixed = run.plan.precision.name.endswith("-mixed")
        self.module = module
        for method in ("forward", *methods):
            self.mark_forward_method(method)

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Make another method of the model run the ``forward`` hook as well.

        Args:
            method: the method or its name.

        Raises:
            UsageError: the model has no such method.
        """
        name = method if isinstance(method, str) else method.__name__
        run, bare = self._run, self._run.loop.unwrapped
        if not callable(getattr(bare.module, name, None)):
            raise UsageError(
                f"{type(bare.module).__name__} has no method {name!r}. "
                "Fix: mark_forward_method(NAME) with the name of an existing method"
            )
        # A plugin that wraps in place has put hooks on the bare model.
        wrapped = any(not plugin.is_core for plugin in run.hooks.implementers("wrap_model"))
        call: Callable[[Any], Any] = partial(bare if wrapped else bare.part, name)
        run.loop.step_functions[name] = call if run.model is bare else self._through(name, call)
        self._methods[name] = self._caller(name)

    def _caller(self, method: str) -> Callable[..., Any]:
        """Return the function that calls one method. Constants are looked up here, once."""
        session_run, run, calls, mixed = self._session_run, self._run, self._calls, self._mixed
        forward = run.hooks.forward
        module: Any = self._modules["module"]

        def call(*args: Any, **kwargs: Any) -> Any:
            if run.model is None:  # the session is closed: call the plain model
                return (module if method == "forward" else getattr(module, method))(*args, **kwargs)
            session_run.begin()
            if not calls.held and torch.is_grad_enabled():
                calls.reducing += 1
            output = forward(run=run, method=method, args=((args, kwargs),))
            return map_tensors(output, _to_32_bits) if mixed else output

        return call

    def _through(self, method: str, bare: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that calls the strategy's wrapper, or without gradients the bare model.

        A wrapper's forward may communicate, but ranks may evaluate different numbers of batches.
        """
        run = self._run

        def call(inputs: Any) -> Any:
            model: Any = run.model
            return model(method, inputs) if torch.is_grad_enabled() else bare(inputs)

        return call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._methods["forward"](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
        ):
            return super().__call__(*args, **kwargs)
        # Skip nn.Module's call machinery: the model itself runs it.
        return self._methods["forward"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__
        if name in attributes.get("_methods", ()):
            return attributes["_methods"][name]
        for store in ("_modules", "_parameters", "_buffers"):
            if name in attributes.get(store, ()):
                return attributes[store][name]
        return getattr(attributes["_modules"]["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if (
            module is not None
            and name not in self.__dict__
            and name != "module"
            and hasattr(module, name)
        ):
            setattr(module, name, value)  # an attribute of the model
        else:
            super().__setattr__(name, value)

    # type: ignore, because nn.Module's method has overloads.
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.module,)


def _itself(module: nn.Module) -> nn.Module:
    return module


def _to_32_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


# --- the module that hooks see --------------------------------------------------------------------


class Models(Module):
    """The module of a Session's run: it holds the models of the session."""


def as_one_module(*modules: Any) -> Any:
    """Return the module that hooks see: a single geartrain Module, otherwise :class:`Models`."""
    if len(modules) == 1 and isinstance(modules[0], Module):
        return modules[0]
    whole = Models()
    for i, module in enumerate(modules):
        whole.add_module(f"model{i}", module)
    return whole


def attach(run: Run, models: Sequence[SessionModel]) -> None:
    """Set the run's module to all models. Warn about the newest's hooks that are never called."""
    module: Any = models[-1].module
    if isinstance(module, Module):
        module._attach(run)
        names = [
            name
            for name in dir(Module)
            if (name.startswith(("on_", "transfer_")) or name in OVERRIDES)
            and overridden(module, name)
        ]
        if names:
            warn(
                f"{type(module).__name__}.{', '.join(names)}: a Session never calls it. "
                "Fix: call it in the loop"
            )
    run.module = module if len(models) == 1 else as_one_module(*(model.module for model in models))


def hyperparameters_of(models: Sequence[SessionModel]) -> dict[str, Any]:
    """Return the arguments of geartrain Modules, by :func:`as_one_module`'s names if several."""
    found: dict[str, Any] = {}
    for i, model in enumerate(models):
        prefix = f"model{i}." if len(models) > 1 else ""
        if isinstance(model.module, Module):
            known = Plan.hyperparameters_of(model.module)
            found |= {prefix + name: value for name, value in known.items()}
    return found
