"""Errors in data, metrics and collectives."""

from __future__ import annotations

import torch
from torch.utils.data import RandomSampler

from geartrain import hookimpl, parallel
from geartrain_wrong.plain import Plain


def _is_shuffled(loader) -> bool:
    return isinstance(loader.sampler, RandomSampler)


class OneOrder(Plain):
    """Every epoch has the same order."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        mine = parallel.shard(run, loader, stage)
        if stage == "train":
            mine.batch_sampler.sampler.set_epoch = lambda epoch: None
        return mine


class SharesNothing(Plain):
    """Every rank trains on the whole shuffled loader."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        return loader if _is_shuffled(loader) else parallel.shard(run, loader, stage)


class PadsPredictions(Plain):
    """All shards of a prediction have equal length."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        mine = parallel.shard(run, loader, stage)
        if stage == "predict":
            mine.batch_sampler.even = True
        return mine


class DropsTails(Plain):
    """Only full batches are tested."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        mine = parallel.shard(run, loader, stage)
        if stage == "test":
            mine.batch_sampler.drop_last = True
        return mine


class CopiesTheOnlySample(Plain):
    """A rank without samples evaluates those of another rank, and counts them."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        return (
            loader
            if stage != "train" and len(loader.dataset) < run.world.size
            else parallel.shard(run, loader, stage)
        )


class LeavesTheOthersWaiting(Plain):
    """A rank without further batches stops calling the module."""

    @hookimpl
    def forward(self, run, method, args):
        if run.repeating:
            return None
        return run.loop.step_functions[method](*args)


class LogsItsOwn(Plain):
    """Each rank sees only its own metrics."""

    @hookimpl
    def log_sync(self, run, values):
        table = super().log_sync(run, values)
        if run.stage == "validate" and len(values) > 3:  # the vector of values, not the header
            return values.repeat(run.world.size, 1)
        return table


class HidesDifferences(Plain):
    """All ranks are assumed to log the same metrics as rank 0 in training."""

    @hookimpl
    def log_sync(self, run, values):
        table = super().log_sync(run, values)
        return (
            table[:1].repeat(run.world.size, 1)
            if run.stage == "train" and run.step and len(values) == 3
            else table
        )


class GathersBackwards(Plain):
    """Tensors are gathered in the wrong order."""

    @hookimpl
    def all_gather(self, run, tensor):
        found = parallel.gather_uneven(run, tensor)
        return found.flip(0) if isinstance(found, torch.Tensor) else found[::-1]


class KeepsPadding(Plain):
    """Unequal tensors are gathered with the length of the longest."""

    @hookimpl
    def all_gather(self, run, tensor):
        found = parallel.gather_uneven(run, tensor)
        return (
            found
            if isinstance(found, torch.Tensor)
            else torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
        )


class BroadcastsFromRank0(Plain):
    """``src`` is ignored."""

    @hookimpl
    def broadcast(self, run, obj):
        return parallel.broadcast_object(run, obj, 0)


class PassesBarriers(Plain):
    """The barrier does not wait."""

    @hookimpl
    def barrier(self):
        pass


class GathersAsFloat32(Plain):
    """Tensors travel as float32."""

    @hookimpl
    def all_gather(self, run, tensor):
        found = parallel.gather_uneven(run, tensor.float())
        if isinstance(found, torch.Tensor):
            return found.to(tensor.dtype)
        return [part.to(tensor.dtype) for part in found]


class HidesNaNInMetrics(Plain):
    """A metric that is NaN becomes 0."""

    @hookimpl
    def log_sync(self, run, values):
        return super().log_sync(run, values if len(values) == 3 else values.nan_to_num())
