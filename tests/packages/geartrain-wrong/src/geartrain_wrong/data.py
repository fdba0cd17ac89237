"""Wrong in data, metrics and collectives."""

from __future__ import annotations

import torch
from torch.utils.data import RandomSampler

from geartrain import hookimpl, parallel
from geartrain_wrong.plain import Plain


def _is_shuffled(loader) -> bool:
    return isinstance(loader.sampler, RandomSampler)


class OneOrder(Plain):
    """Every epoch is shuffled alike."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        mine = parallel.shard(run, loader, stage)
        if stage == "train":
            mine.batch_sampler.sampler.set_epoch = lambda epoch: None
        return mine


class SharesNothing(Plain):
    """Every rank trains on all of a shuffled loader."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        return loader if _is_shuffled(loader) else parallel.shard(run, loader, stage)


class PadsPredictions(Plain):
    """Makes the shards of a prediction equally long."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        mine = parallel.shard(run, loader, stage)
        if stage == "predict":
            mine.batch_sampler.even = True
        return mine


class DropsTails(Plain):
    """Tests on full batches only."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        mine = parallel.shard(run, loader, stage)
        if stage == "test":
            mine.batch_sampler.drop_last = True
        return mine


class CopiesTheOnlySample(Plain):
    """A rank without samples evaluates another rank's, and counts it."""

    @hookimpl
    def shard_dataloader(self, run, loader, stage):
        return (
            loader
            if stage != "train" and len(loader.dataset) < run.world.size
            else parallel.shard(run, loader, stage)
        )


class LeavesTheOthersWaiting(Plain):
    """A rank that has run out of batches stops calling the module."""

    @hookimpl
    def forward(self, run, method, args):
        if run.repeating:
            return None
        return run.step_functions[method](*args)


class LogsItsOwn(Plain):
    """A rank sees its own metrics only."""

    @hookimpl
    def log_sync(self, run, values):
        table = super().log_sync(run, values)
        if run.stage == "validate" and len(values) > 3:  # the vector of values, not the header
            return values.repeat(run.world.size, 1)
        return table


class HidesDifferences(Plain):
    """Takes rank 0's word for what all ranks log in training."""

    @hookimpl
    def log_sync(self, run, values):
        table = super().log_sync(run, values)
        return (
            table[:1].repeat(run.world.size, 1)
            if run.stage == "train" and run.step and len(values) == 3
            else table
        )


class GathersBackwards(Plain):
    """Tensors come in the wrong order."""

    @hookimpl
    def all_gather(self, run, tensor):
        found = parallel.gather_uneven(run, tensor)
        return found.flip(0) if isinstance(found, torch.Tensor) else found[::-1]


class KeepsPadding(Plain):
    """Unequal tensors come as long as the longest."""

    @hookimpl
    def all_gather(self, run, tensor):
        found = parallel.gather_uneven(run, tensor)
        return (
            found
            if isinstance(found, torch.Tensor)
            else torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
        )


class BroadcastsFromRank0(Plain):
    """Whatever ``src`` says."""

    @hookimpl
    def broadcast(self, run, obj):
        return parallel.broadcast_object(run, obj, 0)


class PassesBarriers(Plain):
    """Its barrier is open."""

    @hookimpl
    def barrier(self):
        pass


class EvaluatesZeros(Plain):
    """Loses the weights between ``fit`` and ``validate``."""

    @hookimpl
    def wrap_model(self, run, model):
        parallel.broadcast_weights(run, model)
        if run.command != "fit":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        return model
