"""``self.log`` over ranks that are threads: NaN, other metrics on each rank, and the stop flag.

tests/core/ranks/test_logging.py has the reductions and the number of collectives.
"""

import math

import pytest
from regression import Net, samples
from threads import on_threads
from torch.utils.data import DataLoader

from geartrain import TrainingError


class Logs(Net):
    """Calls a function with itself and its rank at the end of an epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_validation_epoch_end(self):
        self.function(self, self.global_rank)


def validated(ranks, function):
    """Return each rank's metrics of the epoch's end."""
    trainer, strategy = on_threads(ranks)
    trainer.validate(Logs(function), DataLoader(samples(ranks)))
    return [run.metrics for run in strategy.runs]


@pytest.mark.parametrize("reduce_fx", ["min", "max"])
def test_nan_of_one_rank_is_not_dropped(reduce_fx):
    values = (1.0, math.nan, 2.0)
    found = validated(
        3, lambda module, rank: module.log("x", values[rank], reduce_fx=reduce_fx, sync_dist=True)
    )
    assert all(math.isnan(metrics["x"]) for metrics in found)


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (("a", "b"), ({}, {}), "ranks 0 and 1.*'a'"),
        (("a", "a", "b"), ({}, {}, {}), "ranks 0 and 2.*'a'"),
        (("a", "a"), ({}, {"reduce_fx": "max"}), "ranks 0 and 1.*'a'"),
    ],
    ids=["names", "three ranks", "reductions"],
)
def test_different_metrics_raise_on_every_rank(names, options, words):
    trainer, strategy = on_threads(len(names))
    module = Logs(
        lambda module, rank: module.log(names[rank], 1.0, sync_dist=True, **options[rank])
    )
    with pytest.raises(TrainingError, match=words):
        trainer.validate(module, DataLoader(samples(len(names))))
    assert all(isinstance(error, TrainingError) for error in strategy.errors)


class StopsSilently(Net):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = self.global_rank == 1
        return (self(batch[0]) - batch[1]).square().mean()


def test_the_stop_flag_needs_no_metric():
    trainer, strategy = on_threads(max_epochs=50)
    trainer.fit(StopsSilently(), DataLoader(samples(16), batch_size=4))
    assert [run.epoch for run in strategy.runs] == [1, 1]
