"""``--strategy newcomer --devices 2``: train on several processes with only two hooks."""

import torch.distributed as dist

from geartrain import World, hookimpl
from geartrain.parallel import ProcessGroupStrategy


class NewcomerStrategy(ProcessGroupStrategy):
    @hookimpl
    def setup_process_group(self, run):
        dist.init_process_group("gloo")
        return World(dist.get_rank(), dist.get_world_size(), run.cluster.local_rank)

    @hookimpl
    def reduce_gradients(self, run):
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= run.world.size
