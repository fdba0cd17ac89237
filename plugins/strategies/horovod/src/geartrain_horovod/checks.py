"""Checks of options and plan that run before anything starts."""

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
    """Refuse an unknown ``op`` or ``compression``, and options that contradict each other.

    Raises:
        UsageError: names both options and the fix.
    """
    for name, value, known in (("op", op, _OPS), ("compression", compression, _COMPRESSIONS)):
        if value not in known:
            choices = ", ".join(map(repr, known))
            raise UsageError(f"{name}={value!r} is not known. Fix: use one of {choices}")
    if predivide != 1 and op != "average":
        raise UsageError(
            f"gradient_predivide_factor={predivide} is for op='average', not op={op!r}. "
            "Fix: leave it out"
        )
    if distributed_optimizer and groups is not None and predivide != 1:
        raise UsageError(
            f"distributed_optimizer=True, groups={groups} and "
            f"gradient_predivide_factor={predivide} do not go together: Horovod's optimizer does "
            "not divide the gradients of a group. Fix: leave one out"
        )
    if op == "adasum" and (ranks is not None or distributed_optimizer):
        which = (
            "distributed_optimizer=True"
            if distributed_optimizer
            else f"process_set={list(ranks or ())!r}"
        )
        raise UsageError(
            f"op='adasum' and {which} do not go together: Horovod's Adasum reduces the gradients "
            "of all ranks. Fix: leave one out"
        )


def check_numbers(**options: Any) -> None:
    """Refuse numbers that are out of range.

    Raises:
        UsageError: a number is not above 0, or should be whole. ``stall_timeout`` may be 0.
    """
    for name, value in options.items():
        whole = name in ("backward_passes_per_step", "groups", "commit_every_n_steps")
        off = name == "stall_timeout" and value == 0
        number = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
        if value is not None and not (number and (value > 0 or off)):
            kind = "a whole number" if whole else "a number"
            more = ", or 0: no timeout" if name == "stall_timeout" else ""
            raise UsageError(f"{name}={value!r} must be {kind} above 0{more}.")


def check_ranks(ranks: Sequence[int] | None) -> None:
    """Refuse an impossible process set.

    Raises:
        UsageError: the set has fewer than two ranks, has one rank twice, or lacks rank 0, whose
            weights are saved.
    """
    if ranks is None:
        return
    if any(
        isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks
    ) or len(set(ranks)) != len(ranks):
        raise UsageError(
            f"process_set={list(ranks)!r} must be a list of ranks, each once. "
            "Fix: pass ranks, for example [0, 1]"
        )
    if len(ranks) < 2 or 0 not in ranks:
        raise UsageError(
            f"process_set={list(ranks)!r}: ranks outside the set train alone, and checkpoints and "
            "results are rank 0's. Fix: pass at least two ranks, one of them 0"
        )


def size_of(plan: Plan) -> int | None:
    """Return the number of ranks; ``None`` if it is not known yet."""
    place = launcher()
    return plan.processes if place is None else place.size


def check_here(plan: Plan, op: str, timeline: str | None) -> None:
    """Refuse a plan that this machine and its Horovod cannot run.

    Raises:
        UsageError: Horovod is missing, or was built without a part that the plan needs; Horovod is
            already initialised, or cannot be initialised again; Adasum without MPI; a timeline that
            cannot be written.
    """
    if reason := missing():
        raise UsageError(f"{plan.strategy.label}: {reason}")
    if left_mpi():
        raise UsageError(
            f"{plan.strategy.label}: this program's last run failed and left MPI, which a process "
            "can join only once. Fix: start the program again; --resume auto continues the run"
        )
    place, several = launcher(), size_of(plan) != 1
    if several and not meets_by_itself(place) and horovod().is_initialized():
        raise UsageError(
            f"{plan.strategy.label}: Horovod is initialised already, as a world of "
            f"{horovod().size()}: the program called hvd.init(), or one of its runs has not ended. "
            "Fix: leave out hvd.init(), which geartrain calls; or start the program with horovodrun"
        )
    if plan.accelerator.name == "cuda" and not horovod().nccl_built():
        raise UsageError(
            f"{plan.strategy.label}: this Horovod was built without NCCL, which GPUs need. "
            "Fix: build it with HOROVOD_GPU_OPERATIONS=NCCL, or --accelerator cpu"
        )
    # Checked here because Horovod would abort the process from its background thread.
    if op == "adasum" and several and not meets_by_mpi(place):
        built = horovod().mpi_built()
        cause = "the ranks meet by Gloo" if built else "this Horovod was built without it"
        raise UsageError(
            f"{plan.strategy.label}: op='adasum' needs MPI, and {cause}. "
            "Fix: build Horovod with HOROVOD_WITH_MPI=1 and start the program under mpirun or "
            "horovodrun --mpi; or op='average'"
        )
    if timeline is not None and os.environ.get("HOROVOD_TIMELINE", "DYNAMIC") != "DYNAMIC":
        raise UsageError(
            f"timeline={timeline!r}: HOROVOD_TIMELINE={os.environ['HOROVOD_TIMELINE']!r}, which "
            "horovodrun --timeline-filename sets, already makes Horovod write a timeline. "
            "Fix: leave one out"
        )
    cluster = detect()
    if timeline is not None and (cluster is None or cluster.rank == 0):
        folder = Path(timeline).absolute().parent
        if not os.access(folder, os.W_OK):
            raise UsageError(
                f"timeline={timeline!r} cannot be written: {folder} is not a writable folder. "
                "Fix: pass a file in a writable folder"
            )


def check_elastic_options(elastic: bool, every: int | None, **others: Any) -> None:
    """Refuse options that need a fixed world, and options that are for elastic mode only.

    Args:
        every: steps from one commit to the next.
        others: options by name, as the user passed them.

    Raises:
        UsageError: two options do not go together.
    """
    for name, value in others.items():
        if elastic and (value == "adasum" if name == "op" else value is not None):
            raise UsageError(
                f"elastic=True and {name}={value!r} do not go together: ranks come and go. "
                "Fix: leave one out"
            )
    if every is not None and not elastic:
        raise UsageError(
            f"commit_every_n_steps={every} is for elastic=True. "
            "Fix: leave it out, or pass elastic=True"
        )


def check_elastic(label: str) -> None:
    """Refuse elastic mode without horovodrun, which starts the workers.

    Raises:
        UsageError: this process was not started by horovodrun in elastic mode.
    """
    if os.environ.get("HOROVOD_ELASTIC") != "1":
        raise UsageError(
            f"{label}: elastic=True needs horovodrun's elastic mode, in which workers come and go. "
            "Fix: horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script hosts.sh "
            "--network-interfaces NAME python train.py; or elastic=False"
        )


def check_combination(
    plan: Plan, module: Module | type[Module], op: str, ranks: Sequence[int] | None, passes: int
) -> None:
    """Refuse combinations of options, plan and module that cannot work.

    Raises:
        UsageError: names both sides and the fix.
    """
    label, size = plan.strategy.label, size_of(plan)
    if plan.accelerator.name not in ("cpu", "cuda"):
        raise UsageError(
            f"{label}: Horovod does not support {plan.accelerator.name}. "
            "Fix: --accelerator cpu or cuda"
        )
    if op == "adasum" and size is not None and size & (size - 1):
        raise UsageError(
            f"{label}: op='adasum' needs 2, 4, 8, ... ranks, and the plan has {size}. "
            "Fix: use such a number of ranks, or op='average'"
        )
    if ranks is not None and size is not None and max(ranks) >= size:
        raise UsageError(
            f"{label}: process_set={list(ranks)!r} names rank {max(ranks)}, and the plan has "
            f"{size} ranks, counted from 0. Fix: remove it, or use more ranks"
        )
    every = plan.options.accumulate_grad_batches
    if passes not in (1, every) and module.automatic_optimization:
        raise UsageError(
            f"{label}: backward_passes_per_step={passes} contradicts "
            f"accumulate_grad_batches={every}. "
            f"Fix: --accumulate-grad-batches {passes}, which also divides the loss by it"
        )
    if size != 1 and not inspect.isclass(module):
        alone = [
            name for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)
        ]
        if alone:
            raise UsageError(
                f"{label}: {type(module).__name__}.{alone[0]} is torch's SyncBatchNorm, which "
                "needs a torch.distributed group, and Horovod creates none. Fix: use BatchNorm, "
                "whose statistics are rank 0's at the end, or on GPUs horovod.torch.SyncBatchNorm"
            )
