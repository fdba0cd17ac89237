"""``fast``: steps of optimizers over few long tensors instead of many short ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import is_
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import plain_step, step_optimizer, warn
from geartrain_callbacks.fused import time_fused

_NAME = "geartrain-callbacks[fast]"
#: The most elements of a long tensor: larger ones leave the cache of a CPU.
_LONGEST = 65_536
#: A layout that changes more often is of a model whose parameters take turns.
_MOST_LAYOUTS = 10


class Fast:
    """Step SGD, Adam and AdamW over few long tensors, with the same bits.

    The states of parameters become parts of tensors of up to 65,536 elements, into which their
    gradients are copied. These are stepped by the operations of torch's own code, in its order. An
    operation on each element gives the same bits in a longer tensor, and a step has fewer
    operations. Parameters stay where they are: what refers to their memory sees each step.

    Other parameters and other optimizers step as without this plugin: on another device than the
    CPU, sparse and complex ones, those that share memory, those of an optimizer with hooks, and
    optimizers with ``fused``, ``foreach``, ``amsgrad``, ``maximize`` or a tensor as an option.
    All do in manual optimisation, and with ``GEARTRAIN_PLAIN=1``. A warning names an optimizer of
    which no step was computed so.
    Checkpoints have the same contents. At the end of the run each state has its own memory again.

    Args:
        level: ``"exact"``: equal bits. ``"rounding"``: also torch's fused steps, on any device,
            where they are faster. Rank 0 times both on copies before the first step, for at most
            2 s, and decides for all ranks. The optimizer gets the option ``fused``, so a run that
            resumes takes the same. A fused step rounds otherwise: its result differs by a few units
            in the last place, and training amplifies the difference.

    Raises:
        TrainingError: ranks have parts of the parameters, as under fsdp.
        UsageError: ``level`` is something else; or a strategy or another plugin steps optimizers
            itself, as deepspeed and 16-mixed.
    """

    replaces = frozenset({"optimizer_step"})
    #: In an error if another plugin owns the hook.
    must_own = frozenset({"optimizer_step"})

    def __init__(self, level: Literal["exact", "rounding"] = "exact") -> None:
        if level not in ("exact", "rounding"):
            raise UsageError(f"{_NAME}: level={level!r} is unknown. Fix: 'exact' or 'rounding'")
        self.level = level
        self._flat: dict[int, _FlatSteps] = {}

    @hookimpl(wrapper=True)
    def launch(self, run: Run) -> Generator[None, Any, Any]:
        for owner in run.hooks.passed_over("optimizer_step"):
            if not owner.is_core:
                message = f"{owner.label} steps optimizers itself, so that {_NAME} cannot"
                raise UsageError(f"{message}. Fix: leave fast out")
        return (yield)

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
            if self.level == "rounding" and not flat.steps and not optimizer.state:
                self._choose(run, optimizer)
            flat.step()

    def _choose(self, run: Run, optimizer: Optimizer) -> None:
        """Set ``fused`` if that is faster."""
        is_faster = False
        if run.world.rank == 0 and (
            seconds := time_fused(optimizer, lambda copy: _FlatSteps(copy).step)
        ):
            is_faster = seconds[1] < seconds[0]
            times = " and ".join(f"{duration * 1e6:.0f} µs" for duration in seconds)
            step = f"a step of {type(optimizer).__name__} takes {times} if fused"
            print(f"{_NAME}: {step}", file=sys.stderr, flush=True)
        if run.hooks.broadcast(run=run, obj=is_faster, src=0):
            optimizer.defaults["fused"] = True  # of groups that are added
            for group in optimizer.param_groups:
                group["fused"] = True

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        for flat in self._flat.values() if run.world.rank == 0 else ():
            chosen = self.level == "rounding" and flat.is_fused
            if flat.steps > 1 and not (flat.is_used or chosen):
                message = f"{_NAME}: {flat.name} has stepped as without it"
                hint = "leave fast out, or see docs/callbacks.md for the optimizers that it steps"
                warn(f"{message}. Fix: {hint}")

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
        self._optimizer, self.name = optimizer, type(optimizer).__name__
        self.steps, self.is_used = 0, False
        self._groups: list[_Group] = []
        self._state: Any = None
        rule = _RULES.get(type(optimizer))
        # A version of torch with more options may compute otherwise.
        self._rule = rule if rule and optimizer.defaults.keys() <= rule.options else None
        self._layouts = 0 if self._rule else _MOST_LAYOUTS

    @property
    def is_fused(self) -> bool:
        return any(group.get("fused") for group in self._optimizer.param_groups)

    @property
    def pieces(self) -> list[_Piece]:
        return [piece for group in self._groups for piece in group.pieces]

    def step(self) -> None:
        """Do what ``optimizer.step()`` does."""
        plain, self.steps = plain_step(self._optimizer), self.steps + 1
        if plain is not None and self._fits():
            self.is_used = True
            with torch.no_grad():
                for group in self._groups:
                    group.step()
            return
        self.take_apart()
        step_optimizer(self._optimizer)
        if plain is not None and self._layouts < _MOST_LAYOUTS:
            self._join()

    def _fits(self) -> bool:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        return (
            len(groups) == len(self._groups)
            and state is self._state
            and all(
                group.fits(options) for group, options in zip(self._groups, groups, strict=True)
            )
        )

    def _join(self) -> None:
        self._layouts += 1
        self._state = self._optimizer.state
        shared = _sharing(self._optimizer)
        for options in self._optimizer.param_groups:
            trained = [p for p in options["params"] if p.grad is not None]
            alone = any(id(p) in shared or not _is_plain(p) for p in trained)
            if alone or self._rule is None or not self._rule.can(options):
                self._layouts = _MOST_LAYOUTS
                return self.take_apart()
            self._groups.append(_Group(options, trained, self._state, self._rule))

    def take_apart(self) -> None:
        """Give each state memory of its own again."""
        for piece in self.pieces:
            piece.take_apart(self._optimizer.state)
        self._groups = []


class _Group:
    """A group of an optimizer, with the pieces of its parameters that have gradients."""

    def __init__(
        self, options: dict[str, Any], trained: list[torch.Tensor], state: Any, rule: _Rule
    ) -> None:
        self._options, self._rule, self._names = options, rule, rule.states(options)
        self._parameters = list(options["params"])
        self._without = [p for p in options["params"] if p.grad is None]
        self.pieces = [_Piece(alike, state, self._names) for alike in _alike(trained, state)]

    def fits(self, options: dict[str, Any]) -> bool:
        """True if these are still the group's options, parameters and states."""
        return (
            options is self._options
            and len(options["params"]) == len(self._parameters)
            and all(map(is_, options["params"], self._parameters))
            and self._rule.can(options)
            and self._rule.states(options) == self._names
            and all(map(_Piece.fits, self.pieces))
            and all(parameter.grad is None for parameter in self._without)
        )

    def step(self) -> None:
        for piece in self.pieces:
            self._rule.step(piece, self._options)


@dataclass
class _Long:
    """A long tensor, and its parts in the shapes of parameters."""

    whole: torch.Tensor
    parts: list[torch.Tensor]


class _Piece:
    """Parameters whose states are parts of long tensors; that of one parameter stays as it is.

    Args:
        parameters: of one dtype, with as many steps.
        state: the optimizer's.
        names: of its entries that have a parameter's shape.
    """

    def __init__(self, parameters: list[torch.Tensor], state: Any, names: Sequence[str]) -> None:
        self.parameters = parameters
        self._state, self._dtype = state, parameters[0].dtype
        self._sizes = [parameter.numel() for parameter in parameters]
        self._entries = [state[parameter] for parameter in parameters] if names else []
        self.is_joined = len(parameters) > 1 and bool(names)
        if self._entries and "step" in self._entries[0]:
            names = (*names, "step")
        self.states = {name: self._states(name) for name in names}
        #: The states that the optimizer must still have, by parameter.
        self._kept = [list(entries.values()) for entries in self._entries]
        self._ids = [list(map(id, values)) for values in self._kept]
        self._gradients, self._results = self._new(), self._new()

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(self._sizes)

    def _states(self, name: str) -> _Long:
        values = [entries[name] for entries in self._entries]
        if not self.is_joined:
            return _Long(values[0], values)
        whole = torch.cat([value.reshape(-1) for value in values])
        long = _Long(whole, list(whole.unbind())) if name == "step" else self._split(whole)
        for entries, part in zip(self._entries, long.parts, strict=True):
            entries[name] = part
        return long

    def _split(self, whole: torch.Tensor) -> _Long:
        parts = zip(self.parameters, torch.split(whole, self._sizes), strict=True)
        return _Long(whole, [part.view(parameter.shape) for parameter, part in parts])

    def _new(self) -> _Long | None:
        """Return a long tensor for results; none for one parameter."""
        return self._split(torch.empty(self.size, dtype=self._dtype)) if self.is_joined else None

    def fits(self) -> bool:
        """True if states and dtypes are those that were joined, and all gradients are dense."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if (
                gradient is None
                or gradient.layout is not torch.strided
                or parameter.dtype is not self._dtype
            ):
                return False
        # Comparing tensors' ids is the cheapest: ``==`` would compare their elements.
        for parameter, entries, ids in zip(self.parameters, self._entries, self._ids, strict=False):
            if self._state.get(parameter) is not entries or [*map(id, entries.values())] != ids:
                return False
        return True

    def gradients(self) -> list[torch.Tensor]:
        """Return the parameters' own gradients."""
        return [parameter.grad for parameter in self.parameters]  # type: ignore[misc]

    def gradient(self, decay: float) -> torch.Tensor:
        """Return the gradients, and the parameters times ``decay``, as one tensor to read."""
        if self._gradients is None:
            (parameter,), (gradient,) = self.parameters, self.gradients()
            return gradient.add(parameter, alpha=decay) if decay else gradient
        torch._foreach_copy_(self._gradients.parts, self.gradients())
        if decay:
            torch._foreach_add_(self._gradients.parts, self.parameters, alpha=decay)
        return self._gradients.whole

    def compute(self, function: Callable[..., torch.Tensor], *inputs: Any, **options: Any) -> _Long:
        """Return the result of an operation of torch on each element, valid until the next one."""
        if self._results is None:
            result = function(*inputs, **options)
            return _Long(result, [result])
        function(*inputs, **options, out=self._results.whole)
        return self._results

    def take_apart(self, state: Any) -> None:
        """Give the states that are still in the optimizer memory of their own."""
        for index, parameter in enumerate(self.parameters if self.is_joined else ()):
            entries = state.get(parameter, {})
            for name, long in self.states.items():
                if entries.get(name) is long.parts[index]:
                    entries[name] = long.parts[index].clone()


# --- the optimizers -------------------------------------------------------------------------------


def _step_sgd(piece: _Piece, options: dict[str, Any]) -> None:
    """Step as ``torch.optim.sgd._single_tensor_sgd``."""
    decay, momentum, parameters = options["weight_decay"], options["momentum"], piece.parameters
    if momentum:
        gradient, buffer = piece.gradient(decay), piece.states["momentum_buffer"]
        buffer.whole.mul_(momentum).add_(gradient, alpha=1 - options["dampening"])
        if options["nesterov"]:
            buffer = piece.compute(torch.add, gradient, buffer.whole, alpha=momentum)
        changes = buffer.parts
    else:
        changes = piece.gradients()
        if decay:
            changes = list(torch._foreach_add(changes, parameters, alpha=decay))
    torch._foreach_add_(parameters, changes, alpha=-options["lr"])


def _step_adam(piece: _Piece, options: dict[str, Any]) -> None:
    """Step as ``torch.optim.adam._single_tensor_adam``."""
    lr, (beta1, beta2), decay = options["lr"], options["betas"], options["weight_decay"]
    steps = piece.states["step"]
    steps.whole.add_(1)
    step = steps.parts[0].item()
    if decay and options["decoupled_weight_decay"]:
        torch._foreach_mul_(piece.parameters, 1 - lr * decay)
        decay = 0
    gradient = piece.gradient(decay)
    mean, square = piece.states["exp_avg"], piece.states["exp_avg_sq"].whole
    mean.whole.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    divisor = piece.compute(torch.sqrt, square)
    divisor.whole.div_((1 - beta2**step) ** 0.5).add_(options["eps"])
    torch._foreach_addcdiv_(piece.parameters, mean.parts, divisor.parts, -(lr / (1 - beta1**step)))


@dataclass(frozen=True)
class _Rule:
    """How an optimizer of torch steps a piece.

    Args:
        step: the function that steps it.
        numbers: options that must be numbers.
        off: options that must be off.
        others: options with any value.
        states: returns the names of states with a parameter's shape.
    """

    step: Callable[[_Piece, dict[str, Any]], None]
    numbers: tuple[str, ...]
    off: tuple[str, ...]
    others: frozenset[str]
    states: Callable[[dict[str, Any]], tuple[str, ...]]

    @property
    def options(self) -> frozenset[str]:
        return self.others.union(self.numbers, self.off)

    def can(self, options: dict[str, Any]) -> bool:
        """True for a group with these options."""
        return not any(options[name] for name in self.off) and all(
            isinstance(options[name], int | float) for name in self.numbers
        )


_ADAM = _Rule(
    _step_adam,
    numbers=("lr", "eps", "weight_decay"),
    off=("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
    others=frozenset({"betas", "decoupled_weight_decay"}),
    states=lambda options: ("exp_avg", "exp_avg_sq"),
)
_RULES: dict[type, _Rule] = {
    torch.optim.SGD: _Rule(
        _step_sgd,
        numbers=("lr", "momentum", "dampening", "weight_decay"),
        off=("maximize", "foreach", "differentiable", "fused"),
        others=frozenset({"nesterov"}),
        states=lambda options: ("momentum_buffer",) if options["momentum"] else (),
    ),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}


# --- what can be joined ---------------------------------------------------------------------------


def _is_plain(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and parameter.device.type == "cpu"
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
    for _, alike in groupby(parameters, key=lambda p: (p.dtype, _steps(state.get(p, {})))):
        piece: list[torch.Tensor] = []
        for parameter in alike:
            if piece and sum(p.numel() for p in piece) + parameter.numel() > _LONGEST:
                yield piece
                piece = []
            piece.append(parameter)
        yield piece


def _steps(entries: dict[str, Any]) -> float:
    return float(entries.get("step", 0))
