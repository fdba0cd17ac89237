"""The learning-rate finder: its curve, its suggestion, and the attribute that it sets."""

import copy
import math

import pytest
import torch
from small_models import Net, loader, trainer
from torch import nn

from geartrain import TrainingError, UsageError
from geartrain.tuning import LRFinder, Tuner

from .cases import Never, Quadratic, Watch, find


def by_hand(module, batches, lrs):
    """Return the losses of a plain loop of SGD with momentum, given each step's learning rate."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9), []
    for batch, lr in zip(batches, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = module.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_losses_equal_those_of_a_hand_written_loop(mode):
    module = Net(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    same = copy.deepcopy(module)
    found = find(module, mode=mode, min_lr=1e-4, max_lr=1e-1)
    parts = [i / 29 for i in range(30)]
    lrs = [
        1e-4 * 1000**part if mode == "exponential" else 1e-4 + (1e-1 - 1e-4) * part
        for part in parts
    ]
    assert found.lrs == pytest.approx(lrs, rel=1e-12)
    assert (found.lrs[0], found.lrs[-1]) == pytest.approx((1e-4, 1e-1), rel=1e-12)
    assert found.raw_losses == by_hand(same, list(loader()) * 5, found.lrs)
    average, smooth = 0.0, []
    for i, loss in enumerate(found.raw_losses, start=1):
        average = 0.98 * average + 0.02 * loss
        smooth.append(average / (1 - 0.98**i))
    assert found.losses == pytest.approx(smooth, rel=1e-12)
    assert found.results == {"lr": found.lrs, "loss": found.losses}
    assert found.stopped == ""


@pytest.mark.parametrize("curvature", [0.5, 30.0])
def test_with_the_suggestion_a_quadratic_converges(curvature):
    found = find(Quadratic(curvature), min_lr=1e-6, max_lr=100.0, num_training=150)
    suggestion, q, m = (
        found.suggestion(),
        found.lrs[1] / found.lrs[0],
        found.losses.index(min(found.losses)),
    )
    assert suggestion < 2 / curvature
    # Lower bound. Let the loss begin at l. Step k lowers it to at least l (1 - 2 L sum of lr_i),
    # and that sum is at most lr_k q/(q-1). A slope of the average is at most
    # w = 0.02/(1 - 0.98^11) of its distance to the loss. The steepest slope is at least the mean
    # slope from step 10 to the best.
    mean_slope = (found.losses[10] - found.losses[m]) / (m - 10)
    w = 0.02 / (1 - 0.98**11)
    assert suggestion > mean_slope / found.raw_losses[0] / w / (2 * curvature) * (q - 1) / q**2
    assert found.stopped.startswith("the loss diverged at the learning rate")
    assert found.lrs[-1] > 2 / curvature
    assert found.doubt() == ""
    module = Quadratic(curvature, lr=suggestion)
    trainer(max_epochs=200).fit(module, loader(4))
    assert abs(module.x.item()) < 1e-3


def test_the_suggestion_is_the_steepest_fall_without_the_ends():
    losses = [9.0, 1.0, *[1.0] * 12, 0.9, 0.6, 0.5, 0.5, -9.0]
    found = LRFinder("exponential", [0.1 * i for i in range(1, len(losses) + 1)], losses)
    # A slope is measured between a point's two neighbours.
    assert found.suggestion() == found.lrs[14]
    assert found.suggestion(skip_begin=15) == found.lrs[15]
    assert found.suggestion(skip_begin=0) == found.lrs[0]
    assert found.suggestion(skip_end=0) == found.lrs[-1]


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([1.0] * 11, "only 11 steps had a loss, and 11 are ignored"),
        ([1.0] * 30, "the loss fell nowhere between 1 and 30"),
        ([1.0 - 1e-9 * i for i in range(30)], "the loss fell nowhere"),
        ([float(i) for i in range(30)], "the loss fell nowhere"),
    ],
)
def test_a_missing_suggestion_has_a_reason(losses, why):
    found = LRFinder("linear", [float(i + 1) for i in range(len(losses))], losses)
    assert found.suggestion() is None
    assert why in found.why_not()
    assert found.as_dict()["suggestion"] is None


def test_a_noisy_curve_is_doubted():
    lrs = [float(i + 1) for i in range(40)]
    smooth = [*[1.0] * 20, *[1 - 0.04 * i for i in range(20)]]
    noisy = [loss + 0.1 * (-1) ** (i // 2) for i, loss in enumerate(smooth)]
    assert LRFinder("linear", lrs, smooth).doubt() == ""
    assert "noisy" in LRFinder("linear", lrs, noisy).doubt()
    assert "noisy" in LRFinder("linear", lrs, [0.1, *smooth[1:]]).doubt()
    assert LRFinder("linear", lrs[:5], noisy[:5]).doubt() == ""


def test_a_fall_beyond_the_lowest_loss_is_doubted():
    lrs = [float(i + 1) for i in range(40)]
    diverges = [
        *[1 - 0.02 * i for i in range(30)],
        *[9.0, 8.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0],
    ]
    found = LRFinder("linear", lrs, diverges)
    assert found.suggestion() > 30
    assert (
        "the loss was lowest at 30, and only beyond it, where training diverges, fell faster. "
        "Fix: max_lr=30" in found.doubt()
    )


def test_accumulated_batches_count_as_their_mean():
    module = Net()
    losses = [module.loss(batch).item() for batch in loader()]
    found = find(module, options={"accumulate_grad_batches": 4}, min_lr=1e-12, max_lr=2e-12)
    # Six batches an epoch: windows of four and two.
    expected = [sum(losses[:4]) / 4, sum(losses[4:]) / 2] * 15
    assert found.raw_losses == pytest.approx(expected, rel=1e-5)


def test_an_optimizer_with_a_closure_counts_the_loss_before_its_step():
    module = Net(lambda p: torch.optim.LBFGS(p, lr=1.0, max_iter=3))
    losses = [module.loss(batch).item() for batch in loader()]
    found = find(module, min_lr=1e-12, max_lr=2e-12)
    assert found.raw_losses == pytest.approx(losses * 5, rel=1e-5)


def test_groups_keep_their_ratio_to_the_first():
    def two(parameters):
        first, *others = parameters
        return torch.optim.SGD(
            [{"params": [first], "lr": torch.tensor(0.2)}, {"params": others, "lr": 0.02}], lr=1.0
        )

    watch = Watch()
    found = find(Net(two), options={"plugins": [watch]})
    for (first, second), lr in zip(watch.lrs, found.lrs, strict=True):
        assert first == pytest.approx(lr, rel=1e-5)
        assert second == pytest.approx(lr / 10, rel=1e-5)


def test_schedulers_are_not_stepped_and_their_warm_up_is_not_the_ratio():
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [
                {"scheduler": warm, "interval": "step"},
                {"scheduler": plateau, "monitor": "never logged"},
            ]

    watch = Watch()
    found = find(Scheduled(), options={"plugins": [watch]})
    assert [lr for (lr,) in watch.lrs] == found.lrs


def test_estimated_steps_are_those_of_the_finder():
    class OneCycle(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [
                {
                    "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps),
                    "interval": "step",
                }
            ]

    assert len(find(OneCycle()).lrs) == 30


@pytest.mark.parametrize("offset", [0.0, -10.0])
def test_it_ends_when_the_loss_diverges(offset):
    found = find(Quadratic(offset=offset), min_lr=1e-3, max_lr=1e3, num_training=100)
    assert 20 < len(found.lrs) < 100
    best = min(found.losses[:-1])
    assert found.losses[-1] > best + 3 * abs(best)
    assert found.losses[-2] <= best + 3 * abs(best)
    assert f"{found.lrs[-1]:.3g}" in found.stopped


def test_a_low_loss_in_the_first_batch_does_not_count_as_divergence():
    class Lucky(Net):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (1e-6 if self.global_step == 0 else 1)

    assert len(find(Lucky(), max_lr=0.1).lrs) == 30


def test_without_a_threshold_it_does_not_end_early():
    found = find(Quadratic(), min_lr=1e-3, max_lr=10.0, early_stop_threshold=None)
    assert len(found.lrs) == 30
    assert found.stopped == ""


def test_it_ends_when_the_loss_is_not_finite():
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (math.nan if self.global_step == 20 else 1)

    found = find(Breaks(), early_stop_threshold=None)
    assert len(found.lrs) == 20
    assert all(map(math.isfinite, found.losses))
    assert "the loss was nan" in found.stopped


def test_steps_without_a_loss_are_left_out():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if self.global_step % 2 else self.loss(batch)

    found, whole = find(Skips()), find(Net())
    assert found.lrs == whole.lrs[::2]


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_in_manual_optimisation_the_loss_is_the_first_backwards():
    class Two(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.manual_backward(self.loss(batch) * 100)  # these gradients are cleared

    module = Net()
    automatic = find(module)  # the finder does not change the module
    for kind in (Manual, Two):
        manual = kind()
        manual.load_state_dict(module.state_dict())
        found = find(manual)
        assert (found.lrs, found.raw_losses) == (automatic.lrs, automatic.raw_losses)


def test_without_any_loss_the_error_names_the_fix():
    class Past(Manual):
        def training_step(self, batch, batch_idx):
            self.loss(batch).backward()
            self.optimizers().step()

    found = find(Past())
    assert found.suggestion() is None
    assert "no step had a loss" in found.why_not()
    assert "self.manual_backward" in found.why_not()


def test_plot_draws_the_curve_and_marks_the_suggestion():
    found = find(Quadratic(), min_lr=1e-4, max_lr=1.0, num_training=40)
    lines = found.plot(width=40, height=8).splitlines()
    assert len(lines) == 10
    assert sum(line.count("*") for line in lines) > 15
    assert f"{max(found.losses):.4g}" in lines[0]
    assert f"{min(found.losses):.4g}" in lines[7]
    assert lines[-1].strip() == f"{found.suggestion():.3g}"
    assert "|" in lines[3]
    assert "|" not in found.plot(suggest=False)


def test_plot_is_not_flattened_by_a_loss_that_diverges():
    losses = [1.0, 0.8, 0.4, 0.0, 1000.0]
    lines = (
        LRFinder("linear", [1.0, 2.0, 3.0, 4.0, 5.0], losses).plot(width=41, height=11).splitlines()
    )
    assert [line[11:].find("*") for line in lines[:11]] == [
        40,
        -1,
        -1,
        -1,
        -1,
        0,
        10,
        -1,
        20,
        -1,
        30,
    ]
    assert LRFinder("linear").plot() == "nothing to draw"


# --- setting the attribute ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lr", "learning_rate", "base"])
def test_the_suggestion_is_set(name):
    class Named(Quadratic):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=getattr(self, name))

    module = Named()
    module.lr, rate = 0.5, module.lr
    del module.lr
    setattr(module, name, rate)
    found = Tuner(trainer()).lr_find(
        module, loader(), min_lr=1e-4, attr_name="" if name != "base" else "base"
    )
    assert getattr(module, name) == found.suggestion() != rate
    if name == "lr":
        assert module.hparams.lr == found.suggestion()


def test_a_hyperparameter_alone_is_set():
    class Hyper(Quadratic):
        def __init__(self, lr=0.1):
            super().__init__()
            del self.lr

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    module = Hyper()
    found = Tuner(trainer()).lr_find(module, loader(), min_lr=1e-4)
    assert module.hparams.lr == found.suggestion()
    assert not hasattr(module, "lr")


def test_without_a_suggestion_nothing_is_set():
    module = Quadratic(0.0)
    with pytest.warns(
        UserWarning,
        match=r"Quadratic\.lr is unchanged, because no learning rate is suggested: the loss fell "
        r"nowhere",
    ):
        Tuner(trainer()).lr_find(module, loader(), num_training=20)
    assert module.lr == 0.1


# --- refusals -------------------------------------------------------------------------------------


LR_REFUSALS = [
    ({"mode": "cubic"}, {}, "'exponential' or 'linear'"),
    ({"num_training": 12}, {}, "at least 13"),
    ({"num_training": 50.0}, {}, "whole number"),
    ({"min_lr": 0.0}, {}, "above 0"),
    ({"min_lr": 1.0, "max_lr": 0.1}, {}, "the first below the second"),
    ({"max_lr": math.inf}, {}, "above 0"),
    ({"early_stop_threshold": 1.0}, {}, "must be above 1"),
    (
        {"update_attr": True, "attr_name": "rate"},
        {},
        "Never has no rate to set. Fix: update_attr=False",
    ),
    ({}, {"fast_dev_run": True}, "fast_dev_run"),
    ({"datamodule": 3}, {}, "datamodule=3 is not a geartrain.DataModule"),
]


@pytest.mark.parametrize(
    ("arguments", "options", "says"), LR_REFUSALS, ids=[words for _, _, words in LR_REFUSALS]
)
def test_lr_find_refuses(arguments, options, says):
    with pytest.raises(UsageError, match=says):
        find(Never(), options=options, **arguments)


def test_an_iterator_would_be_used_up():
    batches = iter(loader())
    with pytest.raises(UsageError, match="use up"):
        find(Never(), batches)
    assert len(list(batches)) == 6


def test_a_plain_module_is_refused():
    with pytest.raises(UsageError, match=r"Linear is a plain nn\.Module"):
        find(nn.Linear(1, 1))


@pytest.mark.parametrize("optimizer", [lambda p: None, lambda p: torch.optim.SGD(p, lr=0.0)])
@pytest.mark.filterwarnings("ignore:configure_optimizers returned None")
def test_no_learning_rate_to_vary(optimizer):
    with pytest.raises(TrainingError, match="the learning rate to vary"):
        find(Net(optimizer))


def test_the_curve_of_losses_with_weights_is_their_mean():
    class Weighted(Quadratic):
        def training_step(self, batch, batch_idx):
            weight = 1 + batch_idx % 3
            return {"loss": super().training_step(batch, batch_idx) * weight, "weight": weight}

    options = {"accumulate_grad_batches": 2}
    found, expected = (
        find(cls(), num_training=13, options=options) for cls in (Weighted, Quadratic)
    )
    assert found.raw_losses == pytest.approx(expected.raw_losses, rel=1e-5)
