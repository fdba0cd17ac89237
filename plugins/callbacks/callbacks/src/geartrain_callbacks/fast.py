"""``fast``: steps of optimizers over few long tensors instead of many short ones."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import plain_step, step_optimizer

_NAME = "geartrain-callbacks[fast]"
#: The most elements of a long tensor: larger ones leave the cache of a CPU.
_LONGEST = 65_536
#: torch's optimizers that compute each element from the same element of other tensors alone.
_BY_ELEMENT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
#: A layout that changes more often is of a model whose parameters take turns.
_MOST_LAYOUTS = 10


class Fast:
    """Step SGD, Adam and AdamW over few long tensors, with the same bits.

    Parameters of up to 65,536 elements and their gradients are copied into longer tensors, of up to
    65,536 elements each, and their states become parts of such. torch's own code steps these. An
    operation on each element gives the same bits in a longer tensor, and a step has fewer
    operations. Parameters stay where they are: what refers to their memory sees each step.

    Other parameters and other optimizers step as without this plugin: sparse and complex ones,
    those that share memory, those of an optimizer with hooks, and ``fused`` optimizers.
    Checkpoints have the same contents. At the end of the run each state has its own memory again.

    Raises:
        TrainingError: ranks have parts of the parameters, as under fsdp.
        UsageError: a strategy or another plugin steps optimizers itself, as deepspeed and 16-mixed.
    """

    replaces = frozenset({"optimizer_step"})
    #: In an error if another plugin owns the hook.
    must_own = frozenset({"optimizer_step"})

    def __init__(self) -> None:
        self._flat: dict[int, _FlatSteps] = {}

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        for owner in run.hooks.passed_over("optimizer_step"):
            if not owner.is_core:
                message = f"{owner.label} steps optimizers itself, so that {_NAME} cannot"
                raise UsageError(f"{message}. Fix: leave fast out")

    @hookimpl(wrapper=True)
    def wrap_optimizer(self, optimizer: Optimizer) -> Generator[None, Optimizer, Optimizer]:
        wrapped = yield
        parameters = [p for group in wrapped.param_groups for p in group["params"]]
        if any(hasattr(parameter, "placements") for parameter in parameters):
            message = f"{_NAME}: ranks have parts of the parameters, which cannot be joined"
            raise TrainingError(f"{message}. Fix: --strategy ddp, or leave fast out")
        self._flat[id(wrapped)] = _FlatSteps(wrapped)
        return wrapped

    @hookimpl
    def optimizer_step(
        self, run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None
    ) -> None:
        if closure is not None:
            optimizer.step(closure)
        elif (flat := self._flat.get(id(optimizer))) is None:
            step_optimizer(optimizer)
        else:
            flat.step()

    @hookimpl(wrapper=True)
    def teardown_device(self) -> Generator[None, None, None]:
        for flat in self._flat.values():
            flat.take_apart()
        self._flat = {}
        yield


class _FlatSteps:
    """The steps of one optimizer.

    The first is torch's, which makes the states. Then these are joined. If one is replaced, or a
    parameter has no gradient any more, they are taken apart, and a step of torch's follows.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._pieces: list[_Piece] = []
        self._layouts = 0 if type(optimizer) in _BY_ELEMENT else _MOST_LAYOUTS
        #: Steps the pieces with the optimizer's options.
        self._joined: Any = None
        self._state: Any = None
        self._counted: list[int] = []
        #: Parameters that have no gradient, and so no step.
        self._without: list[torch.Tensor] = []

    def step(self) -> None:
        """Do what ``optimizer.step()`` does."""
        optimizer = self._optimizer
        plain = plain_step(optimizer)
        if plain is not None and self._fits():
            self._step_pieces(plain)
            return
        self.take_apart()
        step_optimizer(optimizer)
        if plain is not None and self._layouts < _MOST_LAYOUTS:
            self._join()

    def _step_pieces(self, plain: Callable[[Optimizer], None]) -> None:
        for group, joined in zip(
            self._optimizer.param_groups, self._joined.param_groups, strict=True
        ):
            tensors = joined["params"]
            joined.update(group)  # its learning rate, which schedulers change
            joined["params"] = tensors
        for piece in self._pieces:
            piece.collect()
        plain(self._joined)
        for piece in self._pieces:
            piece.distribute()

    def _fits(self) -> bool:
        """True if the pieces are still the optimizer's parameters and states, with gradients."""
        joined = self._joined
        return (
            joined is not None
            and self._state is self._optimizer.state
            and self._count() == self._counted
            and all(map(_Piece.fits, self._pieces))
            and all(parameter.grad is None for parameter in self._without)
        )

    def _count(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _join(self) -> None:
        optimizer, state = self._optimizer, self._optimizer.state
        self._layouts += 1
        self._state, self._counted, self._without = state, self._count(), []
        groups, shared = [], _sharing(optimizer)
        for group in optimizer.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            self._without += [p for p in group["params"] if p.grad is None]
            if group.get("fused") or any(id(p) in shared or not _is_plain(p) for p in trained):
                self._layouts = _MOST_LAYOUTS
                return self.take_apart()
            pieces = [_Piece(parameters, state) for parameters in _alike(trained, state)]
            self._pieces += pieces
            groups.append({**group, "params": [piece.parameter for piece in pieces]})
        self._joined = object.__new__(type(optimizer))
        self._joined.__dict__ = {**vars(optimizer), "param_groups": groups}
        self._joined.state = _States(self._pieces, state)

    def take_apart(self) -> None:
        """Give each state memory of its own again."""
        for piece in self._pieces:
            piece.take_apart(self._optimizer.state)
        self._pieces, self._joined, self._without = [], None, []


class _States(dict[torch.Tensor, dict[str, Any]]):
    """The states of long tensors; that of a parameter which is not joined is the optimizer's."""

    def __init__(self, pieces: Iterable[_Piece], state: Any) -> None:
        super().__init__({piece.parameter: piece.state for piece in pieces if piece.is_joined})
        self._state = state

    def __missing__(self, parameter: torch.Tensor) -> dict[str, Any]:
        entries: dict[str, Any] = self._state[parameter]
        return entries


class _Piece:
    """Parameters that step as one long tensor; one parameter alone steps as it is."""

    def __init__(self, parameters: list[torch.Tensor], state: Any) -> None:
        self._parameters, self._state = parameters, state
        self._sizes = [parameter.numel() for parameter in parameters]
        self.is_joined = len(parameters) > 1
        self.parameter: torch.Tensor = parameters[0]
        self._copies: list[torch.Tensor] = []
        #: Of the long tensor.
        self.state: dict[str, Any] = {}
        #: The parameters' states by name, as parts of the long ones; numbers are copied.
        self._kept: dict[str, list[Any]] = {}
        if self.is_joined:
            self.parameter = self._join(parameters)
            self._copies = self._parts(self.parameter)
            for key, value in state.get(parameters[0], {}).items():
                values = [state[parameter][key] for parameter in parameters]
                if isinstance(value, torch.Tensor):
                    value = value.clone() if _is_number(value) else self._join(values)
                self._keep(key, value, values)

    def _join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def _parts(self, long: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(self._parameters, torch.split(long, self._sizes), strict=True)
        return [part.view(parameter.shape) for parameter, part in parts]

    def _keep(self, key: str, value: Any, values: list[Any]) -> None:
        """Keep a state of the long tensor, and parts of it as the states of the parameters."""
        if isinstance(value, torch.Tensor) and not _is_number(value):
            values = self._parts(value)
        self.state[key], self._kept[key] = value, values
        for parameter, part in zip(self._parameters, values, strict=True):
            self._state[parameter][key] = part

    def fits(self) -> bool:
        """True if parameters and states are those that were joined, and have dense gradients."""
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if (
                gradient is None
                or gradient.layout is not torch.strided
                or parameter.dtype is not self.parameter.dtype
            ):
                return False
            if self._kept:
                entries = self._state[parameter]
                for key, values in self._kept.items():
                    if entries.get(key) is not values[index]:
                        return False
        return True

    @torch.no_grad()
    def collect(self) -> None:
        """Copy the parameters and their gradients into the long tensors."""
        if self.is_joined:
            gradients: Any = [parameter.grad for parameter in self._parameters]
            self.parameter.grad = torch._C._nn.flatten_dense_tensors(gradients)
            torch._foreach_copy_(self._copies, self._parameters)

    @torch.no_grad()
    def distribute(self) -> None:
        """Copy the parameters back, and the numbers in their states that the step has changed."""
        if self.is_joined:
            torch._foreach_copy_(self._parameters, self._copies)
        for key, value in self.state.items() if self.is_joined else ():
            if key not in self._kept:  # options of the optimizer have changed
                numbers = [value.clone() if _is_number(value) else value for _ in self._parameters]
                self._keep(key, value, numbers)
            elif _is_number(value):
                torch._foreach_copy_(self._kept[key], [value] * len(self._parameters))

    def take_apart(self, state: Any) -> None:
        """Give the states that are still in the optimizer memory of their own."""
        for index, parameter in enumerate(self._parameters if self.is_joined else ()):
            for key, values in self._kept.items():
                entries = state.get(parameter, {})
                if isinstance(values[index], torch.Tensor) and entries.get(key) is values[index]:
                    entries[key] = values[index].clone()


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _is_plain(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and not parameter.is_complex()
    )


def _sharing(optimizer: Optimizer) -> set[int]:
    """Return the ids of parameters that share memory with another."""
    places: dict[int, int] = {}
    sharing: set[int] = set()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        other = places.setdefault(parameter.untyped_storage().data_ptr(), id(parameter))
        if other != id(parameter):
            sharing |= {other, id(parameter)}
    return sharing


def _alike(parameters: Iterable[torch.Tensor], state: Any) -> Iterator[list[torch.Tensor]]:
    """Yield parameters that follow each other and can be joined, at most 65,536 elements each."""
    for _, alike in groupby(parameters, key=lambda p: _kind(p, state.get(p, {}))):
        piece: list[torch.Tensor] = []
        for parameter in alike:
            if piece and sum(p.numel() for p in piece) + parameter.numel() > _LONGEST:
                yield piece
                piece = []
            piece.append(parameter)
        yield piece


def _kind(parameter: torch.Tensor, state: dict[str, Any]) -> tuple[Any, ...]:
    """Return what parameters of one piece have in common."""
    values = [
        (key, value.item() if _is_number(value) else (type(value), getattr(value, "dtype", value)))
        for key, value in sorted(state.items())
    ]
    return parameter.dtype, parameter.device, *values
