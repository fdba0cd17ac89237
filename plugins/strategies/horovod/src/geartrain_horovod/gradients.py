"""Reduction of gradients over ranks while backward still computes.

A hook sends a copy of each gradient when it is complete, and ``reduce_gradients`` writes the result
back. Until then ``parameter.grad`` is this rank's gradient, so code may read it or add to it.
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

#: States of a parameter's gradient on a rank: no gradient, or none since the last reduction; a
#: gradient that was not sent; one that was sent; one that was sent and has changed since. All ranks
#: act on the largest state.
_NOTHING, _HERE, _SENT, _CHANGED = range(4)


@dataclass(frozen=True)
class Reduction:
    """How gradients of several ranks become one."""

    #: ``"average"``, ``"sum"`` or ``"adasum"``.
    op: str = "average"
    #: True if gradients are sent in float16.
    half: bool = False
    #: Averages are divided by this before the sum, and multiplied by it after the sum.
    predivide: float = 1.0
    #: The number of groups; each is sent as a whole. ``None``: each gradient is sent alone.
    groups: int | None = None


class Seen:
    """A gradient and torch's count of its in-place changes.

    A weak reference identifies the gradient; another tensor could get its address later.
    """

    def __init__(self, grad: torch.Tensor) -> None:
        self._grad, self._version = weakref.ref(grad), grad._version

    def same(self, grad: torch.Tensor) -> bool:
        """True if ``grad`` is the same tensor and unchanged."""
        return self._grad() is grad and self._version == grad._version


@dataclass(eq=False)
class Unit:
    """Parameters whose gradients are sent together."""

    name: str
    parameters: list[nn.Parameter]
    #: Parameters whose gradient this backward has completed.
    ready: set[nn.Parameter] = field(default_factory=set)
    #: Handle and name of the operation that was started and not waited for.
    under_way: tuple[int, str] | None = None
    #: The gradients that were sent.
    sent: dict[nn.Parameter, Seen] = field(default_factory=dict)


class Gradients:
    """The gradients of one run, or of one model in a Session.

    Args:
        collectives: the run's collectives.
        reduction: how to reduce.
        process_set: Horovod's process set, or ``None`` for all ranks.
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

    # --- during backward -------------------------------------------------------------------------

    @contextmanager
    def early(self) -> Iterator[None]:
        """Send gradients as soon as a backward in this block completes them.

        Use it around the last backward before the gradients are reduced.
        """
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

    # --- after backward --------------------------------------------------------------------------

    def reduce(self, run: Run) -> None:
        """Reduce the gradients that the next step uses, so that all ranks have the same.

        If a parameter has a gradient on another rank only, this rank sends zeros. If it has none on
        any rank, it keeps none.
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
        """Return the largest state of each gradient, and whether one is sparse: one all-reduce."""
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

    # --- one unit --------------------------------------------------------------------------------

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
        is_single = len(copies) == 1
        handle = self._collectives.start(
            "allreduce_async_" if is_single else "grouped_allreduce_async_",
            copies[0] if is_single else copies,
            **options,
        )
        unit.under_way = handle, name
        unit.sent = {p: Seen(p.grad) for p in unit.parameters if p.grad is not None}

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a copy of the gradient, or zeros: dense, contiguous, of a dtype of Horovod."""
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grad = (grad.to_dense() if grad.layout != torch.strided else grad).detach()
        if grad.is_complex():
            grad = torch.view_as_real(grad.resolve_conj())
        dtype = torch.float32 if grad.dtype == torch.bfloat16 else grad.dtype
        if self._how.half:
            dtype = torch.float16
        return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _arrived(self, unit: Unit) -> list[torch.Tensor]:
        """Wait for a unit that was sent and return its reduced gradients."""
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
                continue  # no rank has used it: leave it, as one process does
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

    # --- which parameters ------------------------------------------------------------------------

    def _about_to_step(self, run: Run) -> set[nn.Parameter]:
        """Return the parameters whose gradients the step uses.

        In automatic mode these are all parameters; in manual optimisation and in a Session, those
        of the optimizer that steps.
        """
        parameters = {
            parameter
            for optimizer in run.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return parameters if run.mode != "automatic" else parameters | set(run.module.parameters())

    def watch(self, run: Run) -> None:
        """Make units of new parameters, and add hooks to parameters that became trainable."""
        new = [
            (name, p) for name, p in named_parameters(run, run.optimizers) if p not in self._unit_of
        ]
        taken = {unit.name for unit in self._units}
        for unit in _units(new, self._how.groups):
            while unit.name in taken:  # models of a Session may share names of parameters
                unit.name += "'"
            taken.add(unit.name)
            self._units.append(unit)
            self._unit_of.update(dict.fromkeys(unit.parameters, unit))
        for parameter in self._unit_of:
            if parameter.requires_grad and parameter not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._completed)  # type: ignore[no-untyped-call]
                self._hooks[parameter] = hook

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def named_parameters(run: Run, optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
    """Return each parameter of the module and optimizers once, with a name equal on all ranks."""
    named = {parameter: name for name, parameter in run.module.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                named.setdefault(parameter, f"optimizer{i}.{j}.{k}")
    return [(name, parameter) for parameter, name in named.items()]


def _units(named: Sequence[tuple[str, nn.Parameter]], groups: int | None) -> list[Unit]:
    """Divide parameters into units of one dtype and device. A frozen parameter is a unit alone.

    Args:
        groups: the number of groups; ``None``: each parameter is a unit.
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
