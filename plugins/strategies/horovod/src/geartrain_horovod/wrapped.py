"""``hvd.DistributedOptimizer`` instead of geartrain's hooks.

Only its reduction of gradients is used: ``reduce_gradients`` synchronises it, and the user's
optimizer steps. A step of Horovod's optimizer would drop the optimizer's state and detach it from
its schedulers. With a closure, ranks would get different weights.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Run, TrainingError, UsageError
from geartrain_horovod.collectives import Collectives
from geartrain_horovod.gradients import Reduction, named_parameters

#: More backward passes than a step has: gradients are sent only when the step is taken. Each
#: optimizer's are sent separately, because models of a Session may share names of parameters.
_LATE = 2**31
_NAME = "of hvd.DistributedOptimizer"


class Wrapped:
    """The distributed optimizers of one run.

    Args:
        passes: backward passes per step of the loop. In manual optimisation and in a Session the
            number is unknown, and this one is not used.
        process_set: Horovod's process set, or ``None`` for all ranks.
    """

    def __init__(
        self, collectives: Collectives, reduction: Reduction, passes: int, process_set: Any = None
    ) -> None:
        self._collectives, self._how = collectives, reduction
        self._passes, self._process_set = passes, process_set
        #: By an optimizer's first parameter: a Session returns another object than it wraps.
        self._made: dict[nn.Parameter, Any] = {}

    def add(self, run: Run, optimizer: Optimizer) -> None:
        """Let Horovod reduce this optimizer's gradients.

        Raises:
            UsageError: Horovod does not support the type or layout of a parameter, or cannot create
                a second optimizer of this class.
        """
        hvd, how = self._collectives.hvd, self._how
        parameters = _parameters(optimizer)
        named = [
            (name, parameter)
            for name, parameter in named_parameters(run, [optimizer])
            if parameter in parameters
        ]
        for name, parameter in named:
            if (
                parameter.dtype == torch.bfloat16
                or parameter.is_complex()
                or not parameter.is_contiguous()
            ):
                message = str(parameter.dtype) if parameter.is_contiguous() else "not contiguous"
                raise UsageError(
                    f"distributed_optimizer=True: {name} is {message}, which Horovod refuses. "
                    "Fix: distributed_optimizer=False"
                )
        options = {} if self._process_set is None else {"process_set": self._process_set}
        try:
            made = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=[
                    (self._collectives.name(f"optimizer.{name}"), parameter)
                    for name, parameter in named
                ],
                compression=hvd.Compression.fp16 if how.half else hvd.Compression.none,
                backward_passes_per_step=self._passes if run.mode == "automatic" else _LATE,
                op=hvd.Sum if how.op == "sum" else hvd.Average,
                gradient_predivide_factor=how.predivide,
                groups=how.groups,
                sparse_as_dense=True,
                **options,
            )
        except TypeError as error:
            raise UsageError(
                f"distributed_optimizer=True: Horovod creates a second {type(optimizer).__name__} "
                f"from its parameter groups only, and it needs more arguments ({error}). "
                "Fix: distributed_optimizer=False"
            ) from error
        self._made[next(iter(parameters))] = made

    @contextmanager
    def early(self) -> Iterator[None]:
        """Guard a micro-batch, in whose backward Horovod's hooks send gradients.

        Raises:
            TrainingError: another rank has gone, or one backward computed a gradient twice, which
                the hooks do not support.
        """
        try:
            with self._collectives.explained("start of all-reduce", _NAME):
                yield
        except AssertionError as error:
            if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith(
                "horovod/torch/optimizer.py"
            ):
                raise
            raise TrainingError(
                "distributed_optimizer=True: one backward computed a gradient several times, as "
                "reentrant checkpoints do, after Horovod had sent it. "
                "Fix: distributed_optimizer=False"
            ) from error

    def reduce(self, run: Run) -> None:
        """Finish the gradients of the optimizers that are about to step.

        Raises:
            TrainingError: a parameter was unfrozen after Horovod's optimizer was created, a
                gradient is sparse, or another rank has gone.
        """
        for optimizer in run.optimizers:
            parameters = _parameters(optimizer)
            made = self._made[next(iter(parameters))]
            for name, parameter in named_parameters(run, [optimizer]):
                if parameter in parameters:
                    _check(name, parameter, made)
            with self._collectives.watched("all-reduce", _NAME):
                _complete_groups(made)
                made.synchronize()

    def close(self) -> None:
        """Remove Horovod's hooks: another run may train the same parameters.

        The hooks are on the autograd nodes that accumulate gradients. A node lives as long as
        something refers to it.
        """
        for made in self._made.values():
            made._grad_accs.clear()
        self._made.clear()


def _check(name: str, parameter: nn.Parameter, made: Any) -> None:
    """Refuse a parameter whose values would differ between ranks.

    Raises:
        TrainingError: a parameter was unfrozen after Horovod's optimizer was created, or its
            gradient is sparse.
    """
    reason = None
    if parameter.requires_grad and parameter not in made._requires_update:
        reason = (
            "was frozen when training began and is not now; its values would differ between ranks"
        )
    elif parameter.grad is not None and parameter.grad.layout != torch.strided:
        reason = "has a sparse gradient, which a rank that does not use it could not reduce"
    if reason is not None:
        raise TrainingError(
            f"distributed_optimizer=True: {name} {reason}. Fix: distributed_optimizer=False"
        )


def _complete_groups(made: Any) -> None:
    """Send the groups that are not sent yet, with zeros for parameters that this rank did not use.

    synchronize() would send the remaining gradients one by one, and the ranks whose group is
    complete would wait for the group without end.
    """
    for group in made._group_counts:
        if group in made._handles:
            continue
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        made._handles[group] = made._grouped_allreduce_grad_async(group)
        for parameter in group:
            made._handles.pop(parameter, None)
        made._group_counts[group] = 0


def _parameters(optimizer: Optimizer) -> dict[nn.Parameter, None]:
    return {parameter: None for group in optimizer.param_groups for parameter in group["params"]}
