"""Gradients made the same on all ranks, on their way while backward still computes.

A gradient is sent as a copy, from a hook that runs when it is complete, and written back in ``reduce_gradients``: until then
``parameter.grad`` is this rank's own, whatever reads it or adds to it meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Run
from geartrain_horovod.collectives import Collectives

#: What a rank has of a parameter's gradient, so that the largest over ranks says what all must do: nothing, or nothing new since the
#: last reduction; a gradient that was not sent; one that was sent; one that was sent and has changed since.
_NOTHING, _HERE, _SENT, _CHANGED = range(4)


@dataclass(frozen=True)
class Reduction:
    """How gradients of several ranks become one."""

    #: ``"average"``, ``"sum"`` or ``"adasum"``.
    op: str = "average"
    #: Whether they travel in float16.
    half: bool = False
    #: Averages are divided by this before the sum, and multiplied after it.
    predivide: float = 1.0
    #: In how many groups they travel, each at once; ``None``: each gradient by itself.
    groups: int | None = None


class Seen:
    """A gradient as it was: itself and not its address, which another could have later, and torch's count of its in-place changes."""

    def __init__(self, grad: torch.Tensor) -> None:
        self._grad, self._version = weakref.ref(grad), grad._version

    def same(self, grad: torch.Tensor) -> bool:
        """Whether it is the same one, unchanged."""
        return self._grad() is grad and self._version == grad._version


@dataclass(eq=False)
class Unit:
    """Parameters whose gradients travel together."""

    name: str
    parameters: list[nn.Parameter]
    #: Which of them have a gradient that this backward has completed.
    ready: set[nn.Parameter] = field(default_factory=set)
    #: What was sent and is under way: handle and name.
    under_way: tuple[int, str] | None = None
    #: The gradients that were sent.
    sent: dict[nn.Parameter, Seen] = field(default_factory=dict)


class Gradients:
    """The gradients of one run, or of one model in a Session.

    Args:
        collectives: of the run.
        reduction: how to reduce.
        process_set: Horovod's, or ``None`` for all ranks.
    """

    def __init__(
        self, collectives: Collectives, reduction: Reduction, process_set: Any = None
    ) -> None:
        self._collectives, self._how, self._process_set = collectives, reduction, process_set
        self._units: list[Unit] = []
        self._unit_of: dict[nn.Parameter, Unit] = {}
        self._hooks: dict[nn.Parameter, Any] = {}
        self._reduced: dict[nn.Parameter, Seen] = {}
        self._early = False

    # --- during backward -------------------------------------------------------------------------------------------------

    @contextmanager
    def early(self) -> Iterator[None]:
        """Send what is completed by a backward in here: the last one before the gradients are reduced."""
        for unit in self._units:
            unit.ready.clear()
        self._early = True
        try:
            yield
        finally:
            self._early = False

    def _completed(self, parameter: nn.Parameter) -> None:
        unit = self._unit_of[parameter]
        unit.ready.add(parameter)
        if (
            self._early
            and unit.under_way is None
            and all(p in unit.ready or not p.requires_grad for p in unit.parameters)
        ):
            self._send(unit)

    # --- after it --------------------------------------------------------------------------------------------------------

    def reduce(self, run: Run) -> None:
        """Make the gradients that a step is about to use the same on all ranks.

        A parameter without a gradient here that has one elsewhere takes part with zeros; one that has none anywhere keeps none.
        """
        self.watch(run)
        stepped = self._about_to_step(run)
        units = [
            unit
            for unit in self._units
            if unit.under_way is not None or not stepped.isdisjoint(unit.parameters)
        ]
        if not units:
            return
        wanted = self._agree(units, stepped)
        for unit in units:
            unit.ready.clear()
            if unit.under_way is None and any(
                wanted[parameter][0] for parameter in unit.parameters
            ):
                self._send(unit)
        again = []
        for unit in units:
            if unit.under_way is None:
                continue
            results = self._arrived(unit)
            if any(wanted[parameter][0] == _CHANGED for parameter in unit.parameters):
                self._send(unit, ".again")
                again.append(unit)
            else:
                self._write(unit, results, wanted)
        for unit in again:
            self._write(unit, self._arrived(unit), wanted)

    def _agree(
        self, units: Sequence[Unit], stepped: set[nn.Parameter]
    ) -> dict[nn.Parameter, tuple[int, bool]]:
        """What some rank has of each parameter's gradient, and whether it is sparse there: one small all-reduce."""
        parameters = [parameter for unit in units for parameter in unit.parameters]
        has = [self._has(parameter, stepped) for parameter in parameters]
        sparse = [
            parameter.grad is not None and parameter.grad.layout != torch.strided
            for parameter in parameters
        ]
        table = torch.tensor([has, sparse], dtype=torch.int32)
        name = self._collectives.name("gradients")
        options = {} if self._process_set is None else {"process_set": self._process_set}
        handle = self._collectives.start(
            "allreduce_async_", table, op=self._collectives.hvd.Max, name=name, **options
        )
        most, sparse_somewhere = self._collectives.wait(
            handle, name, "all-reduce of which ranks have which gradients,"
        ).tolist()
        return {p: (m, bool(s)) for p, m, s in zip(parameters, most, sparse_somewhere, strict=True)}

    def _has(self, parameter: nn.Parameter, stepped: set[nn.Parameter]) -> int:
        unit, grad = self._unit_of[parameter], parameter.grad
        before = (
            self._reduced.get(parameter) if unit.under_way is None else unit.sent.get(parameter)
        )
        same = before is not None and grad is not None and before.same(grad)
        if unit.under_way is not None:
            return _SENT if grad is None or same else _CHANGED
        return _NOTHING if grad is None or same or parameter not in stepped else _HERE

    # --- one unit --------------------------------------------------------------------------------------------------------

    def _send(self, unit: Unit, suffix: str = "") -> None:
        hvd, how = self._collectives.hvd, self._how
        copies = [self._copy(parameter) for parameter in unit.parameters]
        name = self._collectives.name(f"gradient.{unit.name}{suffix}")
        options: dict[str, Any] = {
            "op": {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}[how.op],
            "name": name,
        }
        if how.op == "average":
            options |= {"prescale_factor": 1 / how.predivide, "postscale_factor": how.predivide}
        if self._process_set is not None:
            options["process_set"] = self._process_set
        one = len(copies) == 1
        handle = self._collectives.start(
            "allreduce_async_" if one else "grouped_allreduce_async_",
            copies[0] if one else copies,
            **options,
        )
        unit.under_way = handle, name
        unit.sent = {p: Seen(p.grad) for p in unit.parameters if p.grad is not None}

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's gradient, zeros where it has none, as Horovod can take it: dense, contiguous, of a type that it knows."""
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grad = (grad.to_dense() if grad.layout != torch.strided else grad).detach()
        if grad.is_complex():
            grad = torch.view_as_real(grad.resolve_conj())
        dtype = (
            torch.float16
            if self._how.half
            else torch.float32
            if grad.dtype == torch.bfloat16
            else grad.dtype
        )
        return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _arrived(self, unit: Unit) -> list[torch.Tensor]:
        """Wait for what was sent; the reduced gradients."""
        assert unit.under_way is not None
        result = self._collectives.wait(*unit.under_way, "all-reduce")
        unit.under_way = None
        return [result] if isinstance(result, torch.Tensor) else list(result)

    @torch.no_grad()
    def _write(
        self,
        unit: Unit,
        results: Sequence[torch.Tensor],
        wanted: dict[nn.Parameter, tuple[int, bool]],
    ) -> None:
        for parameter, result in zip(unit.parameters, results, strict=True):
            most, sparse = wanted[parameter]
            if most == _NOTHING:
                continue  # no rank has used it: it is left as it is, as in one process
            value = (
                torch.view_as_complex(result.to(parameter.real.dtype))
                if parameter.is_complex()
                else result.to(parameter.dtype)
            )
            if sparse:
                parameter.grad = value.to_sparse(1)
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(value)
            else:
                parameter.grad.copy_(value)
            assert parameter.grad is not None
            self._reduced[parameter] = Seen(parameter.grad)

    # --- which parameters ------------------------------------------------------------------------------------------------

    def _about_to_step(self, run: Run) -> set[nn.Parameter]:
        """Those whose gradients the step uses: all, and in manual optimisation and in a Session those of the optimizer that steps."""
        own = {
            parameter
            for optimizer in run.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return own if run.mode != "automatic" else own | set(run.module.parameters())

    def watch(self, run: Run) -> None:
        """Make units of parameters that are new, and hook those that became trainable."""
        new = [
            (name, p) for name, p in named_parameters(run, run.optimizers) if p not in self._unit_of
        ]
        taken = {unit.name for unit in self._units}
        for unit in _units(new, self._how.groups):
            while unit.name in taken:  # several models of a Session have parameters of one name
                unit.name += "'"
            taken.add(unit.name)
            self._units.append(unit)
            self._unit_of.update(dict.fromkeys(unit.parameters, unit))
        for parameter in self._unit_of:
            if parameter.requires_grad and parameter not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._completed)  # type: ignore[no-untyped-call]
                self._hooks[parameter] = hook

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def named_parameters(run: Run, optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the module and of optimizers, each once, by names that are the same on every rank."""
    named = {parameter: name for name, parameter in run.module.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                named.setdefault(parameter, f"optimizer{i}.{j}.{k}")
    return [(name, parameter) for parameter, name in named.items()]


def _units(named: Sequence[tuple[str, nn.Parameter]], groups: int | None) -> list[Unit]:
    """Parameters in units; those of a group are of one type and device. A frozen one stands alone.

    Args:
        groups: how many; ``None``: each parameter by itself.
    """
    alone = named if groups is None else [(name, p) for name, p in named if not p.requires_grad]
    units = [Unit(name, [parameter]) for name, parameter in alone]
    trained = [] if groups is None else [(name, p) for name, p in named if p.requires_grad]
    size = max(1, -(-len(trained) // (groups or 1)))
    for i in range(0, len(trained), size):
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in trained[i : i + size]:
            kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
        units += [
            Unit(f"{members[0][0]}+{len(members) - 1}", [p for _, p in members])
            for members in kinds.values()
        ]
    return units
