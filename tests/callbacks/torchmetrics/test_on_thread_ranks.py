"""torchmetrics objects and custom reductions on two ranks: unequal shards, and an empty rank."""

import pytest
import torch
from regression import Curve, Net, one_trainer, samples
from threads import on_threads
from torch.utils.data import DataLoader, Subset

import geartrain as gt
from geartrain.callbacks import ModelCheckpoint

torchmetrics = pytest.importorskip("torchmetrics")

from torchmetrics import MeanMetric, MetricCollection  # noqa: E402
from torchmetrics.regression import MeanSquaredError, SpearmanCorrCoef  # noqa: E402


class Pairs(torchmetrics.Metric):
    """Keep two whole numbers per sample; a rank without samples has another type and shape."""

    def __init__(self):
        super().__init__()
        self.add_state("pairs", [], "cat")

    def update(self, y):
        self.pairs.append((y * 100).long().repeat(1, 2))

    def compute(self):
        joined = self.pairs if isinstance(self.pairs, torch.Tensor) else torch.cat(self.pairs)
        return joined.double().sum()


class Measured(Net):
    def __init__(self):
        super().__init__()
        self.pairs = Pairs()
        self.mse, self.rank = MeanSquaredError(), SpearmanCorrCoef()
        each = {"mean": MeanMetric(), "mse": MeanSquaredError()}
        self.each = MetricCollection(each, prefix="each/")

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.mse(self(x), y)
        self.rank.update(self(x)[:, 0], y[:, 0])
        self.each["mean"].update(y)
        self.each["mse"].update(self(x), y)
        self.pairs.update(y)
        self.log("pairs", self.pairs)
        self.log("mse", self.mse)
        self.log("rank", self.rank)
        self.log_dict(self.each)
        self.log("median", y.mean(), reduce_fx=torch.median, sync_dist=True, on_epoch=True)
        self.log("count", 1.0, reduce_fx=len, sync_dist=True)


@pytest.mark.parametrize("n", [7, 1])
@pytest.mark.filterwarnings(
    "ignore:Metric `Spearman", "ignore:The variance of predictions", "ignore:The ``compute`` method"
)
def test_every_sample_counts_once_on_every_rank(n):
    one, data = one_trainer(), DataLoader(Subset(samples(), range(n)), batch_size=1)
    one.validate(Measured(), data)
    trainer, strategy = on_threads()
    trainer.validate(Measured(), data)
    for run in strategy.runs:
        logged = {"pairs", "mse", "rank", "each/mean", "each/mse", "median", "count"}
        assert set(run.metrics) == logged
        assert run.metrics == pytest.approx(one.run.metrics, rel=1e-5, nan_ok=True)
        assert run.metrics["count"] == n
        assert run.module.mse.update_count == 0


class Reads(Measured):
    """A module that reads the metrics before they are reported, and computes a logged one."""

    def on_validation_epoch_end(self):
        self.read = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        self.computed = self.mse.compute().item()
        self.log("twice", 2 * self.computed)


@pytest.mark.parametrize("n", [7, 1])
@pytest.mark.filterwarnings(
    "ignore:Metric `Spearman", "ignore:The variance of predictions", "ignore:The ``compute`` method"
)
@pytest.mark.filterwarnings("ignore:validate. .* is of rank 0's part")
def test_the_hook_of_an_epochs_end_reads_the_value_of_all_ranks(n):
    trainer, strategy = on_threads()
    trainer.validate(Reads(), DataLoader(Subset(samples(), range(n)), batch_size=1))
    for run in strategy.runs:
        assert run.metrics["twice"] == pytest.approx(2 * run.metrics["mse"])
        logged = {name: value for name, value in run.metrics.items() if name != "twice"}
        assert run.module.read == pytest.approx(logged, nan_ok=True)
        assert run.module.computed == pytest.approx(run.metrics["mse"])


def test_a_rank_may_have_samples_of_one_loader_and_none_of_another():
    class OneEach(Net):
        def __init__(self):
            super().__init__()
            self.sums = torch.nn.ModuleList([torchmetrics.SumMetric(), torchmetrics.SumMetric()])

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.sums[dataloader_idx].update(len(batch[0]))
            self.log("rows", self.sums[dataloader_idx])

    trainer, strategy = on_threads()
    trainer.validate(OneEach(), [DataLoader(samples(n), batch_size=2) for n in (1, 5)])
    assert [run.metrics for run in strategy.runs] == [
        {"rows/dataloader_idx_0": 1.0, "rows/dataloader_idx_1": 5.0}
    ] * 2


def test_a_rank_without_the_logs_of_a_step_computes_the_object_too():
    class Stepwise(Net):
        def __init__(self):
            super().__init__()
            self.rows = torchmetrics.SumMetric()

        def validation_step(self, batch, batch_idx):
            self.rows(len(batch[0]))
            self.log("rows", self.rows, on_step=True, on_epoch=True, sync_dist=True)

    trainer, strategy = on_threads()
    trainer.validate(Stepwise(), DataLoader(samples(1)))
    assert [run.metrics["rows_epoch"] for run in strategy.runs] == [1.0, 1.0]


def test_a_rank_may_compute_an_object_alone_before_the_epoch_ends():
    class Curious(Net):
        def __init__(self):
            super().__init__()
            self.rows = torchmetrics.SumMetric()

        def validation_step(self, batch, batch_idx):
            self.rows.update(len(batch[0]))
            self.log("rows", self.rows)
            if self.trainer.is_global_zero:
                self.rows.compute()

    trainer, strategy = on_threads()
    trainer.validate(Curious(), DataLoader(samples(), batch_size=4))
    assert [run.metrics["rows"] for run in strategy.runs] == [48.0, 48.0]


def test_objects_continue_after_the_last_step_of_an_epoch(tmp_path):
    class Trains(Net):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch, batch_idx):
            self.mean.update(batch[1].mean())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    def fit(**options):
        lines, every = Curve("mean"), {"save_top_k": -1, "every_n_train_steps": 1}
        steps = ModelCheckpoint(dirpath=tmp_path, filename="{step}", **every)
        trainer, _ = on_threads(max_epochs=2, plugins=[lines, steps])
        trainer.fit(Trains(), DataLoader(samples(), batch_size=4, shuffle=True), **options)
        return lines.values

    whole = fit()
    assert fit(ckpt_path=tmp_path / "step=6.ckpt") == whole


def test_ranks_that_log_different_objects_are_named():
    class Differs(Net):
        def __init__(self):
            super().__init__()
            self.a, self.b = MeanMetric(), MeanMetric()

        def validation_step(self, batch, batch_idx):
            metric = self.a if self.global_rank else self.b
            metric.update(1.0)
            self.log("a" if self.global_rank else "b", metric)

    trainer, _ = on_threads()
    message = "ranks 0 and 1 logged different metric objects: 'a' is not the same"
    with pytest.raises(gt.TrainingError, match=message):
        trainer.validate(Differs(), DataLoader(samples(), batch_size=4))


def test_a_rank_without_samples_must_find_the_object():
    class Hides(Net):
        def __init__(self):
            super().__init__()
            self.hidden = [MeanMetric()]

        def validation_step(self, batch, batch_idx):
            self.hidden[0].update(1.0)
            self.log("hidden", self.hidden[0])

    trainer, _ = on_threads()
    message = "'hidden'.: a rank without samples cannot find the metric. Fix: use an attribute"
    with pytest.raises(gt.TrainingError, match=message):
        trainer.validate(Hides(), DataLoader(samples(1)))


class Trained(Measured):
    """A module with a metric of its training, whose values have a graph."""

    def __init__(self):
        super().__init__()
        self.trained = MeanSquaredError()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.log("trained", self.trained(self(x), y), on_step=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings(
    "ignore:Metric `Spearman", "ignore:The variance of predictions", "ignore:The ``compute`` method"
)
def test_a_repeated_batch_leaves_a_metric_of_the_training_alone():
    trainer, strategy = on_threads(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(
        Trained(),
        DataLoader(samples(), batch_size=4),
        DataLoader(Subset(samples(), range(3)), batch_size=1),
    )
    assert all(run.metrics["count"] == 3 for run in strategy.runs)
    assert all(run.module.trained.update_count for run in strategy.runs)
