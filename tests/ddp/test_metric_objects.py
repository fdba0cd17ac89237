"""torchmetrics objects and user-defined reductions over two ranks with unequal or empty shards."""

import pytest
from several_ranks import failed, kept_by
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.regression import MeanSquaredError, SpearmanCorrCoef

from .cases import Net, ddp, one_trainer, samples


class Measured(Net):
    def __init__(self):
        super().__init__()
        self.mse, self.rank = MeanSquaredError(), SpearmanCorrCoef()
        self.each = MetricCollection(
            {"mean": MeanMetric(), "mse": MeanSquaredError()}, prefix="each/"
        )

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.mse(self(x), y)
        self.rank.update(self(x)[:, 0], y[:, 0])
        self.each["mean"].update(y)
        self.each["mse"].update(self(x), y)
        self.log("mse", self.mse)
        self.log("rank", self.rank)
        self.log_dict(self.each)
        self.log(
            "median",
            y.mean(),
            reduce_fx=lambda values: values.median(),
            sync_dist=True,
            on_epoch=True,
        )
        self.log("count", 1.0, reduce_fx=len, sync_dist=True)


def one(n):
    return DataLoader(Subset(samples(), range(n)), batch_size=1)


def measure(make=ddp):
    found = {}
    for n in (7, 1):
        net, trainer = Measured(), make()
        trainer.validate(net, one(n))
        found[n] = dict(trainer.run.metrics)
        assert net.mse.update_count == 0
    return found


two_ranks = kept_by(measure)


@pytest.fixture(scope="module")
def one_process():
    return measure(one_trainer)


@pytest.mark.parametrize("n", [7, 1])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.filterwarnings("ignore:Metric `Spearman")
def test_every_sample_counts_once_on_every_rank(two_ranks, one_process, n, rank):
    assert set(two_ranks[rank][n]) == {"mse", "rank", "each/mean", "each/mse", "median", "count"}
    assert two_ranks[rank][n] == pytest.approx(one_process[n], rel=1e-5, nan_ok=True)
    assert two_ranks[rank][n]["count"] == n


class Differs(Net):
    def __init__(self):
        super().__init__()
        self.a, self.b = MeanMetric(), MeanMetric()

    def validation_step(self, batch, batch_idx):
        metric = self.a if self.global_rank else self.b
        metric.update(1.0)
        self.log("a" if self.global_rank else "b", metric)


def log_different_objects():
    ddp().validate(Differs(), DataLoader(samples(), batch_size=4))


def test_ranks_that_log_different_objects_are_named(tmp_path):
    first, second = failed(tmp_path, log_different_objects)
    assert (
        "ranks 0 and 1 logged different metric objects: 'a' is not the same on both"
        in first.error + second.error
    )
