"""torchmetrics objects under dp have the same values as in one process, for any split."""

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection, RunningMean, SumMetric
from torchmetrics.regression import MeanSquaredError

import geartrain as gt
from geartrain_dp import replicas
from geartrain_dp.metrics import PartMetrics

from .cases import Curve, Net, dp, one_trainer, samples, weights
from .measures import STEPS, Measures
from .test_state import warned

pytestmark = pytest.mark.filterwarnings("ignore:Metric `Spearman")


class Measured(Measures, Net):
    pass


def measured(strategy, devices, batch_size):
    curve, module = Curve(*STEPS), Measured()
    trainer = one_trainer(
        strategy=strategy, devices=devices, plugins=[curve], max_epochs=2, num_sanity_val_steps=1
    )
    data = (
        DataLoader(samples(), batch_size=batch_size),
        DataLoader(samples(25), batch_size=batch_size),
    )
    trainer.fit(module, *data)
    return module, curve.values, trainer.run.metrics


# 3 samples on 2 devices are parts of 2 and 1. The last batch has 6 of 48 samples, and 4 or 1 of 25;
# a batch with 1 sample is one part.
@pytest.mark.parametrize(("devices", "batch_size"), [(2, 3), (3, 7)])
def test_steps_and_epochs_have_the_values_of_one_process(devices, batch_size):
    module, curve, metrics = measured("dp", devices, batch_size)
    _, expected, expected_metrics = measured("single", 1, batch_size)
    assert len(curve) == len(STEPS) * 2 * -(-48 // batch_size)
    assert curve == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)
    assert {
        "fit_accuracy_epoch",
        "val_accuracy_epoch",
        "val_rank",
        "val_each/f1_epoch",
        "fit_updated/f1",
        "val_first",
    } <= set(metrics)
    assert all(not m._forward_hooks for m in module.modules())


def test_the_state_of_a_metric_does_not_count_as_lost():
    assert warned(dp(), "fit", Measured(), DataLoader(samples(), batch_size=7)) == []


def test_a_metric_that_is_called_twice_in_a_step_logs_each_call():
    class Twice(Net):
        def __init__(self):
            super().__init__()
            self.mse = MeanSquaredError(squared=False)

        def training_step(self, batch, batch_idx):
            y = batch[1]
            for name, value in (("one", 1.0), ("two", 2.0)):
                self.mse(torch.full_like(y, value), y)
                self.log(name, self.mse, on_step=True)
            return super().training_step(batch, batch_idx)

    curves = {}
    for strategy in ("single", "dp"):
        curve = Curve("one", "two")
        one_trainer(
            strategy=strategy,
            devices=1 if strategy == "single" else 2,
            plugins=[curve],
            max_steps=3,
        ).fit(Twice(), DataLoader(samples(), batch_size=3))
        curves[strategy] = curve.values
    assert len(curves["dp"]) == 6
    assert curves["dp"] == pytest.approx(curves["single"], rel=1e-5)
    assert curves["dp"][0] != pytest.approx(curves["dp"][1])


def test_the_value_that_forward_returns_is_the_parts_and_is_logged_as_a_number():
    class Returned(Net):
        def __init__(self):
            super().__init__()
            self.total = SumMetric()

        def validation_step(self, batch, batch_idx):
            self.log("samples", self.total(torch.tensor(float(len(batch[0])))), reduce_fx="sum")

        def on_validation_epoch_end(self):
            self.whole = self.total.compute()

    module, trainer = Returned(), dp(2)
    trainer.validate(module, DataLoader(samples(25), batch_size=3))
    assert (trainer.run.metrics["samples"], module.whole) == (25, 25)


class Wrong(Net):
    def __init__(self, metric=None):
        super().__init__()
        self.metric, self.other, self.hidden = metric or SumMetric(), SumMetric(), [SumMetric()]

    def training_step(self, batch, batch_idx):
        self.metric.update(1.0)
        self.other(2.0)
        self.hidden[0](3.0)
        self.given(len(batch[0]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda self, n: self.log("x", self.metric), "on_step=True.*was not called"),
        (lambda self, n: self.log("x", self.metric if n == 2 else self.other), "different objects"),
        (lambda self, n: self.log("x", 1.0 if n == 2 else self.other), "different objects"),
        (lambda self, n: self.log("x", self.other if n == 2 else 1.0), "different objects"),
        (lambda self, n: self.log("x", self.hidden[0]), "an attribute of the module"),
        (lambda self, n: self.log("x", self.other, on_epoch=n == 2), "other options"),
        (
            lambda self, n: self.log("x", self.other, rank_zero_only=True),
            "leave out rank_zero_only",
        ),
    ],
)
def test_values_that_cannot_be_logged_are_errors(given, words):
    module = Wrong()
    module.given = given.__get__(module)
    with pytest.raises(gt.TrainingError, match=words):
        dp(2).fit(module, DataLoader(samples(), batch_size=3))


def test_a_window_of_updates_is_refused_with_its_name():
    module = Wrong(RunningMean(window=3))
    module.given = lambda n: None
    before = weights(module)
    with pytest.raises(
        gt.TrainingError,
        match=r"geartrain-dp\[dp\]: metric \(RunningMean\) keeps a window.*Fix: --strategy ddp",
    ):
        dp(2).fit(module, DataLoader(samples(), batch_size=3))
    assert all(torch.equal(value, before[name]) for name, value in weights(module).items())


# --- on GPUs: torch's "meta" device takes their place, without computation ------------------------


class Where(Metric):
    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.zeros(()), dist_reduce_fx="sum")
        self.devices = []

    def update(self, x, scale):
        self.devices += [x.device.type, scale.device.type]

    def compute(self):
        return torch.zeros((), device="meta")


def test_arguments_of_a_metric_move_to_its_device():
    module, meta = Net(), torch.device("meta")
    module.where, module.net = (
        Where(),
        torch.nn.ModuleDict({"each": MetricCollection({"where": Where()})}),
    )
    metrics, x = PartMetrics(module, [meta, meta]), torch.ones(2)
    with metrics.watched():
        metrics.begin(1)
        module.where(x, scale=x)
        module.where.update(x, x)
        module.net["each"](x, scale=x)
    assert module.where.devices == ["meta"] * 4
    assert module.net["each"]["where"].devices == ["meta"] * 2
    seen = metrics.seen("x", module.where)
    assert (seen.call[0][0] is x, seen.call[1]["scale"] is x) == (True, True)
    module.where.update(x, x)
    assert module.where.devices[4:] == ["cpu"] * 2
    metrics.begin(0)
    assert metrics.seen("x", module.where).call is None


@pytest.mark.parametrize("side_by_side", [True, False])
def test_parts_with_metrics_are_started_one_after_another(monkeypatch, side_by_side):
    started = []

    def parallel_apply(modules, inputs, kwargs, devices):
        started.append(list(modules))
        return [module(*arguments) for module, arguments in zip(modules, inputs, strict=True)]

    monkeypatch.setattr(replicas, "parallel_apply", parallel_apply)
    parts = [torch.nn.Identity(), torch.nn.Identity()]
    found = replicas._apply(
        parts, [(torch.ones(1),), (torch.ones(2),)], [torch.device("meta")] * 2, side_by_side
    )
    assert [list(output.shape) for output in found] == [[1], [2]]
    assert started == ([parts] if side_by_side else [[part] for part in parts])
