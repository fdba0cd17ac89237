"""The models and loaders that a Session hands back, which fire the hooks inside somebody's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geartrain import UsageError
from geartrain.plugin_api import close_batches, has_no_own_samples, map_tensors, set_epoch

if TYPE_CHECKING:
    from geartrain import Run
    from geartrain_session.session import Session


class Called(nn.Module):
    """The model as a strategy wraps it: ``called("forward", (args, kwargs))``, where a Trainer's strategy gets ``StepForwarder(module)``.

    The inputs are one argument, so that a strategy which splits a batch splits all of them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        return self.part(method, inputs)

    def part(self, method: str, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Call a method of the module; its ``forward`` with nn.Module's own hooks."""
        # Straight from the dict: nn.Module's __getattr__ would cost as much as the rest of this method.
        module: Any = self._modules["module"]
        return (module if method == "forward" else getattr(module, method))(*inputs[0], **inputs[1])

    def has_end(self, method: str) -> bool:
        """There is no ``*_step_end`` here."""
        return False


@dataclass(slots=True)
class Calls:
    """What a model knows of its calls; apart from it, because setting an attribute of an nn.Module costs a microsecond."""

    #: How many had gradients that their backward reduces: those outside of ``no_backward_sync``.
    reducing: int = 0
    #: Whether ``no_backward_sync`` is open.
    held: bool = False


class SessionModel(nn.Module):
    """A model in a Session: a call goes through the ``forward`` hook, and so through precision and strategy.

    Everything else of the model's (attributes, parameters, ``state_dict``) is reached as before. A copy or a pickle of it is the model
    alone.
    """

    def __init__(self, session: Session, run: Run, module: nn.Module, methods: Iterable[str]) -> None:
        super().__init__()
        self._session, self._run = session, run
        self._methods: dict[str, Callable[..., Any]] = {}
        self._calls = Calls()
        # Under autocast outputs are of 16 bits, and a loss that is computed outside of the model would be too.
        self._mixed = run.plan.precision.name.endswith("-mixed")
        self.module = module
        for method in ("forward", *methods):
            self.mark_forward_method(method)

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Let another method of the model's that computes what is trained go through the ``forward`` hook as well.

        Raises:
            UsageError: the model has no such method.
        """
        name = method if isinstance(method, str) else method.__name__
        run, bare = self._run, self._run.unwrapped
        if not callable(getattr(bare.module, name, None)):
            raise UsageError(f"{type(bare.module).__name__} has no method {name!r}. Fix: mark_forward_method(NAME) of one that it has")
        part: Callable[[Any], Any] = partial(bare.part, name)
        run.step_functions[name] = part if run.model is bare else self._through(name, part)
        self._methods[name] = self._caller(name)

    def _caller(self, method: str) -> Callable[..., Any]:
        """What calling one method comes to; everything that does not change is looked up once."""
        session, run, calls, forward, mixed = self._session, self._run, self._calls, self._run.hooks.forward, self._mixed
        module: Any = self._modules["module"]

        def call(*args: Any, **kwargs: Any) -> Any:
            if run.model is None:  # the session is closed: the model is as it was before
                return module(*args, **kwargs) if method == "forward" else getattr(module, method)(*args, **kwargs)
            if not session._begun:
                session._begin()
            if not calls.held and torch.is_grad_enabled():
                calls.reducing += 1
            output = forward(run=run, method=method, args=((args, kwargs),))
            return map_tensors(output, _to_32_bits) if mixed else output

        return call

    def _through(self, method: str, part: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The model as the strategy wrapped it; without gradients the bare one: a wrapper's forward may communicate, and ranks need not
        evaluate alike."""
        run = self._run

        def call(inputs: Any) -> Any:
            model: Any = run.model
            return model(method, inputs) if torch.is_grad_enabled() else part(inputs)

        return call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._methods["forward"](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self._methods["forward"](*args, **kwargs)  # without nn.Module's call machinery, through which the model itself goes

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if name in own.get("_methods", ()):
            return own["_methods"][name]
        for store in ("_modules", "_parameters", "_buffers"):
            if name in own.get(store, ()):
                return own[store][name]
        return getattr(own["_modules"]["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and name not in self.__dict__ and name != "module" and hasattr(module, name):
            setattr(module, name, value)  # the model's own attribute
        else:
            super().__setattr__(name, value)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # nn.Module's has overloads
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.module,)


def _itself(module: nn.Module) -> nn.Module:
    return module


def _to_32_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class SessionLoader:
    """A loader's batches of this rank, on its device; each pass is the next epoch.

    Args:
        run: the session's, with this loader alone.
        moves: whether batches go to the device.
    """

    def __init__(self, session: Session, run: Run, loader: Iterable[Any], moves: bool) -> None:
        self._session, self._run, self._loader, self._moves = session, run, loader, moves
        self._passes = 0

    def __iter__(self) -> Iterator[Any]:
        session, run, loader = self._session, self._run, self._loader
        if not session._begun:
            session._begin()
        set_epoch(loader, self._passes)
        self._passes += 1
        if has_no_own_samples(loader):  # its one sample is another rank's
            return
        batches = run.hooks.device_batches(run=run, loader=loader, stage=run.stage) if self._moves else iter(loader)
        try:
            yield from batches
        finally:
            close_batches(batches, loader)

    def __len__(self) -> int:
        return 0 if has_no_own_samples(self._loader) else len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self._loader, name)
