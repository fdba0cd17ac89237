"""Errors in the start of a run, and in checkpoints."""

from __future__ import annotations

import torch.distributed as dist

from geartrain import hookimpl
from geartrain_wrong.plain import Plain


class BroadcastsFromRank1(Plain):
    """All ranks start with the weights of rank 1."""

    @hookimpl
    def wrap_model(self, run, model):
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=min(1, run.world.size - 1))
        return model


class StartsAsFloat32(Plain):
    """Weights and buffers travel as float32."""

    @hookimpl
    def wrap_model(self, run, model):
        for tensor in model.state_dict().values():
            sent = tensor.float()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)
        return model


class SavesNothing(Plain):
    """A checkpoint is never written."""

    @hookimpl
    def save_checkpoint(self): ...
