"""``hvd.DistributedOptimizer`` in the place of our own hooks.

Only its gradients are used: it is synchronised in ``reduce_gradients``, and the user's own optimizer steps. Stepping Horovod's would drop
the optimizer's state, part it from its schedulers, and with a closure let ranks drift apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Run, TrainingError, UsageError
from geartrain_horovod.collectives import Collectives
from geartrain_horovod.gradients import Reduction, named_parameters


class Wrapped:
    """The distributed optimizers of one run.

    Args:
        passes: backward passes in one step.
        process_set: Horovod's, or ``None`` for all ranks.
    """

    def __init__(self, collectives: Collectives, reduction: Reduction, passes: int, process_set: Any = None) -> None:
        self._collectives, self._how, self._passes, self._process_set = collectives, reduction, passes, process_set
        #: By an optimizer's first parameter: a Session hands out another object than it wraps.
        self._made: dict[nn.Parameter, Any] = {}

    def add(self, run: Run, optimizer: Optimizer) -> None:
        """Let Horovod reduce this optimizer's gradients.

        Raises:
            UsageError: its parameters are of a type or layout that Horovod does not take, or it cannot be made anew.
        """
        hvd, how = self._collectives.hvd, self._how
        own = _parameters(optimizer)
        named = [(name, parameter) for name, parameter in named_parameters(run, [optimizer]) if parameter in own]
        for name, parameter in named:
            if parameter.dtype == torch.bfloat16 or parameter.is_complex() or not parameter.is_contiguous():
                what = str(parameter.dtype) if parameter.is_contiguous() else "not contiguous"
                raise UsageError(f"distributed_optimizer=True: {name} is {what}, which Horovod refuses. Fix: distributed_optimizer=False")
        options = {} if self._process_set is None else {"process_set": self._process_set}
        try:
            made = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=[(self._collectives.name(f"optimizer.{name}"), parameter) for name, parameter in named],
                compression=hvd.Compression.fp16 if how.half else hvd.Compression.none,
                backward_passes_per_step=self._passes,
                op=hvd.Sum if how.op == "sum" else hvd.Average,
                gradient_predivide_factor=how.predivide,
                groups=how.groups,
                sparse_as_dense=True,
                **options,
            )
        except TypeError as error:
            raise UsageError(
                f"distributed_optimizer=True: Horovod makes {type(optimizer).__name__} anew from its parameter groups, and it takes more "
                f"({error}). Fix: distributed_optimizer=False"
            ) from error
        self._made[next(iter(own))] = made

    def reduce(self, run: Run) -> None:
        """Finish the gradients of the optimizers that are about to step.

        Raises:
            TrainingError: a parameter was unfrozen after Horovod had looked, or another rank has gone.
        """
        for optimizer in run.optimizers:
            own = _parameters(optimizer)
            made = self._made[next(iter(own))]
            late = [
                name for name, p in named_parameters(run, [optimizer]) if p in own and p.requires_grad and p not in made._requires_update
            ]
            if late:
                raise TrainingError(
                    f"distributed_optimizer=True: {late[0]} was frozen when training began and is not now; Horovod would let the ranks "
                    "drift apart. Fix: distributed_optimizer=False"
                )
            with self._collectives.watched("all-reduce", "of hvd.DistributedOptimizer"):
                made.synchronize()

    def close(self) -> None:
        """Let Horovod hear of no gradient any more: the parameters may be trained again, by another run.

        Its hooks are on the nodes that accumulate gradients, which live as long as something holds them.
        """
        for made in self._made.values():
            made._grad_accs.clear()
        self._made.clear()


def _parameters(optimizer: Optimizer) -> dict[nn.Parameter, None]:
    return {parameter: None for group in optimizer.param_groups for parameter in group["params"]}
