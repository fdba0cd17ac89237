"""``self.log`` in the parts gives one value for the whole batch."""

import math

import pytest
import torch
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl

from .cases import Curve, Net, dp, one_trainer, samples


class Logging(Net):
    def training_step(self, batch, batch_idx):
        x, y = batch
        errors = (self(x) - y).square()
        both = {"on_step": True, "on_epoch": True}
        self.log("mean", errors.mean(), **both)
        self.log("float", x.sum().item() / len(x), **both)
        self.log("sum", errors.sum(), reduce_fx=torch.sum, **both)
        self.log("count", (errors > 0.5).sum(), reduce_fx="sum", **both)
        self.log("min", errors.min(), reduce_fx=min, **both)
        self.log("max", errors.max().item(), reduce_fx="max", **both)
        self.log("weighted", errors.mean(), batch_size=len(x), **both)
        for factor in (1, 10):
            self.log("twice", float(len(x) * factor), reduce_fx="sum", **both)
        return errors.mean()


NAMES = ("mean", "float", "sum", "count", "min", "max")


def logged(strategy, devices, batch_size=7):
    curve = Curve(*(f"{name}_step" for name in NAMES))
    trainer = one_trainer(strategy=strategy, devices=devices, plugins=[curve])
    trainer.fit(Logging(), DataLoader(samples(), batch_size=batch_size))
    return curve.values, trainer.run.metrics


def test_every_value_is_that_of_the_whole_batch():
    curve, metrics = logged("single", 1)
    theirs, their_metrics = logged("dp", 3)
    assert len(curve) == 7 * len(NAMES)
    assert theirs == pytest.approx(curve, rel=1e-5, abs=1e-6)
    assert their_metrics.keys() == metrics.keys()
    for name in metrics:
        assert their_metrics[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), name
    assert their_metrics["twice_epoch"] == 48 * 11


class Given(Net):
    """Calls the test's function ``given`` in each part, to log values."""

    def validation_step(self, batch, batch_idx):
        self.given(self, batch[0])


def validated(given, n=5, batch_size=5, devices=2, **options):
    module = Given()
    module.given = given
    trainer = dp(devices, **options)
    trainer.validate(module, DataLoader(samples(n), batch_size=batch_size))
    return trainer.run.metrics


def test_a_given_batch_size_is_that_of_the_part():
    # Parts of 3 and 2 samples, with batch_size=1 and batch_size=4.
    sizes = {3: 1, 2: 4}
    found = validated(lambda module, x: module.log("v", float(len(x)), batch_size=sizes[len(x)]))
    assert found["v"] == pytest.approx((3 * 1 + 2 * 4) / 5)
    # A second batch with one part: the first weighs as much as the sum of its parts.
    found = validated(
        lambda module, x: module.log("v", float(len(x)), batch_size=sizes.get(len(x), 5)), n=6
    )
    assert found["v"] == pytest.approx((3 * 1 + 2 * 4 + 1 * 5) / 10)


def test_ones_have_a_mean_of_exactly_one():
    assert (
        validated(
            lambda module, x: module.log("v", torch.tensor(1.0)), n=43, batch_size=7, devices=3
        )["v"]
        == 1.0
    )


def test_a_value_that_one_part_logs_weighs_that_parts_samples():
    def given(module, x):
        if len(x) == 2:
            module.log("v", 6.0)

    assert validated(given)["v"] == 6.0


@pytest.mark.parametrize(("reduce_fx", "expected"), [("SUM", 5.0), ("Max", 3.0), ("avg", 2.6)])
def test_reductions_in_any_case(reduce_fx, expected):
    assert validated(lambda module, x: module.log("v", float(len(x)), reduce_fx=reduce_fx))[
        "v"
    ] == pytest.approx(expected)


def test_nan_wins():
    found = validated(
        lambda module, x: module.log("v", math.nan if len(x) == 2 else 1.0, reduce_fx="min")
    )
    assert math.isnan(found["v"])


def test_a_tensor_that_changes_later_is_logged_as_it_was():
    total = torch.zeros(())

    def given(module, x):
        total.add_(1)
        module.log("v", total, reduce_fx="sum")

    assert validated(given)["v"] == 3


def test_a_method_kept_in_init_logs_for_its_part_too():
    """The method is bound to the module, not to a replica."""

    class Keeping(Net):
        def __init__(self):
            super().__init__()
            self.keep = {"log": self.log}

        def validation_step(self, batch, batch_idx):
            self.keep["log"]("n", float(len(batch[0])), reduce_fx="sum")
            self.keep["log"]("mean", float(len(batch[0])))

    trainer = dp()
    trainer.validate(Keeping(), DataLoader(samples(5), batch_size=5))
    assert trainer.run.metrics == pytest.approx({"n": 5, "mean": (3 * 3 + 2 * 2) / 5})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda module, x: module.log("v", x), "a metric is one number"),
        (lambda module, x: module.log("v", "text"), "a metric is a number"),
        (lambda module, x: module.log("v", 1.0, reduce_fx="meen"), "unknown reduction"),
        (
            lambda module, x: module.log("v", 1.0, prog_bar=len(x) == 2),
            "called with other options before: prog_bar",
        ),
        (lambda module, x: module.log("", 1.0), "non-empty string"),
    ],
)
def test_wrong_calls_raise_cores_errors(given, message):
    with pytest.raises(gt.TrainingError, match=message):
        validated(given)


class FromHooks:
    @hookimpl(wrapper=True)
    def forward(self, run):
        run.log("before", 2.0, reduce_fx="sum")
        output = yield
        run.log("after", 2.0, reduce_fx="sum")
        return output


def test_hooks_log_outside_the_parts():
    found = validated(
        lambda module, x: module.log("v", 1.0, reduce_fx="sum"), n=10, plugins=[FromHooks()]
    )
    assert found == {"before": 4, "v": 4, "after": 4}


def test_several_loaders_keep_their_metrics_apart():
    class Two(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("n", float(len(batch[0])) + dataloader_idx, reduce_fx="sum")

    trainer = dp()
    trainer.validate(
        Two(), [DataLoader(samples(5), batch_size=5), DataLoader(samples(4), batch_size=4)]
    )
    assert trainer.run.metrics == {"n/dataloader_idx_0": 5, "n/dataloader_idx_1": 6}


def test_images_and_the_like_are_those_of_the_first_part():
    said = []

    class Keeps:
        @hookimpl
        def log_media(self, media):
            said.append(media.value)

    class Says(Net):
        def training_step(self, batch, batch_idx):
            self.log_text("first", str(batch[0][0].tolist()))
            return super().training_step(batch, batch_idx)

    data = samples()
    one_trainer(strategy="dp", devices=2, plugins=[Keeps()]).fit(
        Says(), DataLoader(data, batch_size=len(data))
    )
    assert said == [str(data[0][0].tolist())]
