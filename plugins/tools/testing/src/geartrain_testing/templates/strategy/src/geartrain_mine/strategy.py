"""A strategy of several processes that average their gradients with torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from geartrain import Run, UsageError, World, hookimpl
from geartrain.parallel import ProcessGroupStrategy, name_absent_ranks


class MineStrategy(ProcessGroupStrategy):
    """One process per device. Gradients are averaged over all processes once per step.

    Args:
        timeout: seconds that a rank waits for the others before the run ends with an error.

    Raises:
        UsageError: ``timeout`` is not above 0.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        if timeout <= 0:
            raise UsageError(f"timeout={timeout!r} must be above 0 seconds.")
        self.timeout = timedelta(seconds=timeout)

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        # `launch` has set `run.cluster`, this rank's place, and `run.store`, which every rank
        # reaches. The base class uses the group that starts here for metrics and barriers.
        place = run.cluster
        assert place is not None
        with name_absent_ranks(run):
            dist.init_process_group(
                "nccl" if run.device.type == "cuda" else "gloo",
                store=run.store,
                rank=place.rank,
                world_size=place.size,
                timeout=self.timeout,
            )
        return World(place.rank, place.size, place.local_rank, place.local_size, place.node_rank)

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        if run.world.size == 1:
            return
        parameters = list(run.module.parameters())  # ranks may have frozen others
        # Ranks may have gradients for different parameters, but all ranks must call the same
        # collectives. So they first agree: which parameters have a gradient on any rank?
        here = [p.grad is not None for p in parameters]
        anywhere = torch.tensor(here, dtype=torch.int, device=run.device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        for parameter, used in zip(parameters, anywhere.tolist(), strict=True):
            if not used:
                continue  # no gradient, as in one process: the optimizer skips this parameter
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= run.world.size
