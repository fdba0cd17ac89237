"""Several processes that average their gradients after the last backward, with torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from geartrain import Run, UsageError, World, hookimpl
from geartrain.parallel import ProcessGroupStrategy, name_absent_ranks


class MineStrategy(ProcessGroupStrategy):
    """One process a device; gradients are averaged over all of them once a step.

    The base class starts this node's other ranks by running the same command again, or joins those of torchrun, SLURM
    or MPI; it ends all of them with the first error. It gives each rank its part of the data and rank 0's weights at
    the start, gathers metrics, and leaves the process group. The conformance kit tests all of it. Declare limits as
    ``capabilities = {"multi_node": False}``.

    Args:
        timeout: seconds that a rank waits for the others before the run ends with an error.

    Raises:
        UsageError: a timeout that is not above 0.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        if timeout <= 0:
            raise UsageError(f"timeout={timeout!r} must be above 0 seconds.")
        self.timeout = timedelta(seconds=timeout)

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        # `launch` has set this rank's place, and has made a store that every rank reaches: on one machine it listens
        # on loopback only. Collectives (metrics, all_gather, barrier) go through the group that is made here.
        place = run.cluster
        assert place is not None
        backend = "nccl" if run.device.type == "cuda" else "gloo"
        with name_absent_ranks(run):
            dist.init_process_group(
                backend,
                store=run.store,
                rank=place.rank,
                world_size=place.size,
                timeout=self.timeout,
            )
        return World(dist.get_rank(), dist.get_world_size(), place.local_rank, place.local_size, place.node_rank)

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        # Called once a step, after the last micro-batch's backward: with accumulation, too, there is one reduction.
        if run.world.size == 1:
            return
        parameters = [p for p in run.module.parameters() if p.requires_grad]
        # A step may leave parameters out, and on some ranks only; all ranks must take part in the same collectives.
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int, device=run.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameter, somewhere in zip(parameters, used.tolist(), strict=True):  # on cuda the CPU waits here
            if not somewhere:
                continue  # no gradient, as in one process: the optimizer leaves the parameter alone
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= run.world.size
