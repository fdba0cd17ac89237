"""torchmetrics objects in ``self.log``: values by step and by epoch, and the reset."""

import copy
import pickle

import pytest
import torch
from small_models import EvalNet, Loggers, fit, loader, trainer
from torchmetrics import MeanMetric, MetricCollection, MultitaskWrapper, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision, BinaryRecall
from torchmetrics.regression import MeanSquaredError, SpearmanCorrCoef

from geartrain import TrainingError
from geartrain_callbacks.torchmetrics_objects import find_metrics, temporary_copies


class Measured(EvalNet):
    """A module that logs metrics of validation, and one of training by step and by epoch."""

    def __init__(self, **options):
        super().__init__()
        self.mse, self.rank, self.total = MeanSquaredError(), SpearmanCorrCoef(), SumMetric()
        self.options = options

    def training_step(self, batch, batch_idx):
        self.total(float(batch_idx))
        self.log("total", self.total, on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.mse.update(self(x), y)
        self.rank.update(self(x)[:, 0], y[:, 0])
        self.log("mse", self.mse, **self.options)
        self.log("rank", self.rank)


def test_the_epochs_value_is_computed_over_all_samples():
    net = Measured()
    one = fit(net, loader(), loader(22, 5), num_sanity_val_steps=2)
    x, y = (torch.cat(parts) for parts in zip(*loader(22, 5), strict=True))
    with torch.no_grad():
        mse = float(torch.nn.functional.mse_loss(net(x), y))
        rank = float(SpearmanCorrCoef()(net(x)[:, 0], y[:, 0]))
    found = {name: one.callback_metrics[name] for name in ("mse", "rank")}
    assert found == pytest.approx({"mse": mse, "rank": rank}, rel=1e-5)


def test_each_epoch_starts_from_scratch_and_a_step_has_its_own_value():
    lines = Loggers()
    one = fit(Measured(), log_every_n_steps=1, max_epochs=2, plugins=[lines])
    steps = [metrics["total_step"] for _, metrics in lines.lines if "total_step" in metrics]
    epochs = [metrics["total_epoch"] for _, metrics in lines.lines if "total_epoch" in metrics]
    assert (steps, epochs) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0] * 2, [15.0, 15.0])
    assert one.callback_metrics["total"] == 15.0


def test_a_metric_logged_only_by_steps_is_also_reset():
    class Net(Measured):
        def training_step(self, batch, batch_idx):
            self.total(1.0)
            self.log("total", self.total, on_step=True, on_epoch=False)
            return self.loss(batch)

    net = Net()
    fit(net, max_epochs=2)
    assert net.total.update_count == 0


class Collected(EvalNet):
    def __init__(self):
        super().__init__()
        self.scores = MetricCollection(
            [BinaryAccuracy(), BinaryPrecision(), BinaryRecall()], prefix="val/"
        )

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.scores.update(self(x).sigmoid(), (y > 0).long())
        self.log_dict(self.scores, prog_bar=True)


def test_a_collection_logs_each_of_its_metrics():
    net, one = Collected(), trainer()
    for n in (24, 9):  # the second starts from scratch
        one.validate(net, loader(n, 5))
        x, y = (torch.cat(parts) for parts in zip(*loader(n, 5), strict=True))
        expected = copy.deepcopy(net.scores)
        expected.reset()
        with torch.no_grad():
            expected.update(net(x).sigmoid(), (y > 0).long())
        values = {name: float(value) for name, value in expected.compute().items()}
        assert one.callback_metrics == pytest.approx(values)
    names = {name.removeprefix("val/Binary") for name in one.callback_metrics}
    assert names == {"Accuracy", "Precision", "Recall"}


def test_a_multitask_wrapper_logs_each_metric_of_its_tasks():
    class Tasks(EvalNet):
        def __init__(self):
            super().__init__()
            kinds = MetricCollection([BinaryAccuracy(), BinaryRecall()])
            self.tasks = MultitaskWrapper({"y": MeanSquaredError(), "kind": kinds}, prefix="val/")

        def training_step(self, batch, batch_idx):
            self.measure(batch)
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.measure(batch)

        def measure(self, batch):
            x, y = batch
            y_hat, kind = self(x), (y > 0).long()
            self.tasks({"y": y_hat, "kind": y_hat.sigmoid()}, {"y": y, "kind": kind})
            self.log_dict(self.tasks)

    net, one = Tasks(), trainer()
    for n in (24, 9):
        one.validate(net, loader(n, 5))
        x, y = (torch.cat(parts) for parts in zip(*loader(n, 5), strict=True))
        with torch.no_grad():
            y_hat, kind = net(x), y > 0
        right = ((y_hat > 0) == kind).float()
        expected = {
            "val/y": float((y_hat - y).square().mean()),
            "val/kind_BinaryAccuracy": float(right.mean()),
            "val/kind_BinaryRecall": float(right[kind].mean()),
        }
        assert one.callback_metrics == pytest.approx(expected)
    assert "val/kind_BinaryRecall" in fit(net).callback_metrics


def test_the_module_pickles_before_and_after():
    net = Measured()
    fit(pickle.loads(pickle.dumps(net)), loader(), loader())
    fit(net, loader(), loader())
    assert pickle.loads(pickle.dumps(net)).mse.update_count == 0


def test_copies_replace_every_metric_of_a_module():
    net = Collected()
    net.inner, net.again = torch.nn.ModuleList([MeanMetric()]), net.scores
    own, member, mean = net.scores, net.scores["BinaryAccuracy"], net.inner[0]
    assert [path for path, _ in find_metrics(net)] == ["scores", "again", "inner.0"]
    with temporary_copies(net):
        assert net.again is net.scores is not own
        assert net.inner[0] is not mean
        assert own["BinaryAccuracy"] is member
        net.inner[0].update(3.0)
    assert (net.scores, net.again, net.inner[0]) == (own, own, mean)
    assert mean.update_count == 0


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (lambda self: self.log("x", self.scores), r"several values. Fix: self.log_dict\(metric\)"),
        (lambda self: self.log("x", self.tasks), "MultitaskWrapper has several values"),
        (lambda self: self.log_dict(self.mean), r"log_dict\(MeanMetric\).*Fix: self.log\(name"),
        (lambda self: self.log("x", self.mean, rank_zero_only=True), "leave out rank_zero_only"),
        (
            lambda self: (self.log("x", self.mean), self.log("x", self.mse)),
            "another MeanSquaredError before",
        ),
        (lambda self: self.log("x", self.layers), "not Sequential"),
        (lambda self: self.log("x", self.mean, on_step=True), "on_step=True.*was not called"),
        (lambda self: self.log("x", self.several), r"shape \[2\], not one number"),
    ],
)
def test_unsupported_values_are_refused(log, words):
    class Wrong(EvalNet):
        def __init__(self):
            super().__init__()
            self.scores = MetricCollection([BinaryAccuracy()])
            self.mean, self.mse = MeanMetric(), MeanSquaredError()
            self.several = MeanSquaredError(num_outputs=2)
            self.tasks = MultitaskWrapper({"a": MeanMetric()})

        def validation_step(self, batch, batch_idx):
            self.mean.update(1.0)
            self.mse.update(torch.ones(1), torch.ones(1))
            self.several.update(torch.ones(3, 2), torch.ones(3, 2))
            log(self)

    with pytest.raises(TrainingError, match=words):
        trainer().validate(Wrong(), loader())


def test_without_the_distribution_the_error_ends_in_the_install_line(monkeypatch):
    monkeypatch.setattr("geartrain.metrics.objects._declared", tuple)
    fix = "is an object of torchmetrics.*Fix: pip install geartrain-callbacks"
    with pytest.raises(TrainingError, match=rf"'mse'\): MeanSquaredError {fix}"):
        trainer().validate(Measured(), loader())
