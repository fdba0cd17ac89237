"""What is refused before anything starts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from geartrain import Module, Plan, UsageError
from geartrain.plugin_api import detect
from geartrain_horovod.installed import missing
from geartrain_horovod.launching import horovod, launcher, left_mpi, meets_by_itself, meets_by_mpi

_OPS = ("average", "sum", "adasum")
_COMPRESSIONS = ("none", "fp16")


def check_choices(
    op: str,
    compression: str,
    predivide: float,
    ranks: Sequence[int] | None,
    distributed_optimizer: bool,
    groups: int | None,
) -> None:
    """Refuse an unknown ``op`` or ``compression``, and what does not go with an ``op``.

    Raises:
        UsageError: with both sides and the way out.
    """
    for name, value, known in (("op", op, _OPS), ("compression", compression, _COMPRESSIONS)):
        if value not in known:
            raise UsageError(
                f"{name}={value!r} is not known. Fix: one of {', '.join(map(repr, known))}"
            )
    if predivide != 1 and op != "average":
        raise UsageError(
            f"gradient_predivide_factor={predivide} is for op='average', not op={op!r}. Fix: leave it out"
        )
    if distributed_optimizer and groups is not None and predivide != 1:
        raise UsageError(
            f"distributed_optimizer=True, groups={groups} and gradient_predivide_factor={predivide} do not go together: Horovod's own "
            "optimizer does not divide in groups. Fix: leave one out"
        )
    if op == "adasum" and (ranks is not None or distributed_optimizer):
        which = (
            "distributed_optimizer=True"
            if distributed_optimizer
            else f"process_set={list(ranks or ())!r}"
        )
        raise UsageError(
            f"op='adasum' and {which} do not go together: Horovod's Adasum takes all ranks' gradients. Fix: leave one out"
        )


def check_numbers(**options: Any) -> None:
    """Refuse options whose numbers cannot be.

    Raises:
        UsageError: one that is not above 0, or no whole number where one is needed. ``stall_timeout`` may be 0.
    """
    for name, value in options.items():
        whole, off = (
            name in ("backward_passes_per_step", "groups", "commit_every_n_steps"),
            name == "stall_timeout" and value == 0,
        )
        number = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
        if value is not None and not (number and (value > 0 or off)):
            more = ", or 0: never" if name == "stall_timeout" else ""
            raise UsageError(
                f"{name}={value!r} must be {'a whole number' if whole else 'a number'} above 0{more}."
            )


def check_ranks(ranks: Sequence[int] | None) -> None:
    """Refuse ranks of a process set that cannot be.

    Raises:
        UsageError: fewer than two, one twice, or rank 0, whose weights are kept, is not among them.
    """
    if ranks is None:
        return
    if any(
        isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks
    ) or len(set(ranks)) != len(ranks):
        raise UsageError(
            f"process_set={list(ranks)!r} must be ranks, each once. Fix: [0, 1], for one"
        )
    if len(ranks) < 2 or 0 not in ranks:
        raise UsageError(
            f"process_set={list(ranks)!r}: ranks outside of it train alone, and checkpoints and results are rank 0's. "
            "Fix: at least two ranks, one of them 0"
        )


def size_of(plan: Plan) -> int | None:
    """How many ranks there will be; ``None`` where nobody knows yet."""
    place = launcher()
    return plan.processes if place is None else place.size


def check_here(plan: Plan, op: str, timeline: str | None) -> None:
    """Refuse what this machine and its Horovod cannot do.

    Raises:
        UsageError: no Horovod, or one that was built without what is needed; one that is initialised already, or cannot be again; Adasum
            without MPI; a timeline that could not be written.
    """
    if reason := missing():
        raise UsageError(f"{plan.strategy.label}: {reason}")
    if left_mpi():
        raise UsageError(
            f"{plan.strategy.label}: this program's last run has failed and left MPI, which a process joins once. "
            "Fix: start the program anew; --resume auto goes on where it stopped"
        )
    place, several = launcher(), size_of(plan) != 1
    if several and not meets_by_itself(place) and horovod().is_initialized():
        raise UsageError(
            f"{plan.strategy.label}: Horovod is initialised already, as a world of {horovod().size()}: the program has called hvd.init(), "
            "or a run of it has not ended. Fix: leave out hvd.init(), which geartrain calls; or start the program with horovodrun"
        )
    if plan.accelerator.name == "cuda" and not horovod().nccl_built():
        raise UsageError(
            f"{plan.strategy.label}: this Horovod was built without NCCL, which GPUs need. "
            "Fix: build it with HOROVOD_GPU_OPERATIONS=NCCL, or --accelerator cpu"
        )
    if (
        op == "adasum" and several and not meets_by_mpi(place)
    ):  # in Horovod's own thread the process would be aborted
        why = (
            "the ranks meet by Gloo"
            if horovod().mpi_built()
            else "this Horovod was built without it"
        )
        raise UsageError(
            f"{plan.strategy.label}: op='adasum' needs MPI, and {why}. "
            "Fix: a Horovod built with HOROVOD_WITH_MPI=1, under mpirun or horovodrun --mpi; or op='average'"
        )
    if timeline is not None and os.environ.get("HOROVOD_TIMELINE", "DYNAMIC") != "DYNAMIC":
        raise UsageError(
            f"timeline={timeline!r}: HOROVOD_TIMELINE={os.environ['HOROVOD_TIMELINE']!r}, as horovodrun --timeline-filename sets it, has "
            "Horovod write one from the start. Fix: leave one out"
        )
    where = detect()
    if (
        timeline is not None
        and (where is None or where.rank == 0)
        and not os.access(Path(timeline).absolute().parent, os.W_OK)
    ):
        raise UsageError(
            f"timeline={timeline!r} cannot be written: {Path(timeline).absolute().parent} is no folder to write in."
        )


def check_elastic_options(elastic: bool, every: int | None, **others: Any) -> None:
    """Refuse options that need ranks to stay as they are, and those that are for elastic mode alone.

    Args:
        every: steps from one commit to the next.
        others: options by name, as they were given.

    Raises:
        UsageError: two that cannot go together.
    """
    for name, value in others.items():
        if elastic and (value == "adasum" if name == "op" else value is not None):
            raise UsageError(
                f"elastic=True and {name}={value!r} do not go together: ranks come and go. Fix: leave one out"
            )
    if every is not None and not elastic:
        raise UsageError(
            f"commit_every_n_steps={every} is for elastic=True. Fix: leave it out, or elastic=True"
        )


def check_elastic(label: str) -> None:
    """Refuse elastic mode where nobody brings workers.

    Raises:
        UsageError: this process was not started by horovodrun in elastic mode.
    """
    if os.environ.get("HOROVOD_ELASTIC") != "1":
        raise UsageError(
            f"{label}: elastic=True needs horovodrun's elastic mode, in which workers come and go. Fix: horovodrun -np 2 --min-np 1 "
            "--max-np 4 --host-discovery-script hosts.sh --network-interfaces NAME python train.py; or elastic=False"
        )


def check_combination(
    plan: Plan, module: Module | type[Module], op: str, ranks: Sequence[int] | None, passes: int
) -> None:
    """Refuse what cannot go together.

    Raises:
        UsageError: with both sides and the way out.
    """
    label, size = plan.strategy.label, size_of(plan)
    if plan.accelerator.name not in ("cpu", "cuda"):
        raise UsageError(
            f"{label}: Horovod knows nothing of {plan.accelerator.name}. Fix: --accelerator cpu or cuda"
        )
    if op == "adasum" and size is not None and size & (size - 1):
        raise UsageError(
            f"{label}: op='adasum' needs a power of two of ranks, and there are {size}. Fix: 2, 4, 8, ..., or op='average'"
        )
    if ranks is not None and size is not None and max(ranks) >= size:
        raise UsageError(
            f"{label}: process_set={list(ranks)!r} names rank {max(ranks)}, and there are {size} ranks, from 0 on."
        )
    every = plan.options.accumulate_grad_batches
    if passes not in (1, every) and module.automatic_optimization:
        raise UsageError(
            f"{label}: backward_passes_per_step={passes}, and a step has accumulate_grad_batches={every}. "
            f"Fix: --accumulate-grad-batches {passes}, which divides the loss by it too"
        )
    if size != 1 and not inspect.isclass(module):
        alone = [
            name for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)
        ]
        if alone:
            raise UsageError(
                f"{label}: {type(module).__name__}.{alone[0]} is torch's SyncBatchNorm, which needs a torch.distributed group, and Horovod "
                "makes none. Fix: BatchNorm, whose statistics are rank 0's at the end, or on GPUs horovod.torch.SyncBatchNorm"
            )
