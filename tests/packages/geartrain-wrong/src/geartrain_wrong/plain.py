"""A correct strategy, simple and slow: the base of every wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from geartrain import World, hookimpl
from geartrain.parallel import ProcessGroupStrategy


class Plain(ProcessGroupStrategy):
    """Average gradients one parameter at a time, after the last backward.

    Args:
        timeout: seconds that a rank waits for the others.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timedelta(seconds=timeout)

    @hookimpl
    def setup_process_group(self, run):
        dist.init_process_group("gloo", timeout=self.timeout)
        return World(
            dist.get_rank(),
            dist.get_world_size(),
            run.cluster.local_rank,
            run.cluster.local_size,
            run.cluster.node_rank,
        )

    @hookimpl
    def reduce_gradients(self, run):
        average(run, run.module.parameters())


def average(run, parameters: Iterable[nn.Parameter], by_users: bool = False) -> None:
    """Replace gradients by their mean over ranks; a missing gradient counts as zero.

    Args:
        by_users: divide by the number of ranks that have a gradient, which is wrong.
    """
    for parameter, users in used(parameters):
        dist.all_reduce(parameter.grad)
        parameter.grad /= users if by_users else run.world.size


def used(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each parameter that has a gradient on any rank, and on how many; others get zeros."""
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        users = torch.tensor([parameter.grad is not None], dtype=torch.int)
        dist.all_reduce(users)
        if users.item() == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        yield parameter, int(users.item())
