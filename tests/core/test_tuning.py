"""The finders: what they find, that they are right, and that nothing of them stays."""

import copy
import gc
import math
import random
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import EMA, Callback, EarlyStopping
from geartrain.tuning import LRFinder, Tuner
from geartrain.tuning.batch_size import is_out_of_memory

from .models import Loggers, Net, Stream, loader, samples, trainer


def find(module, train=None, options=None, **arguments):
    """A curve without a suggestion being set, over 30 steps unless said otherwise."""
    given = {"num_training": 30, "update_attr": False, **arguments}
    return Tuner(trainer(**(options or {}))).lr_find(module, loader() if train is None else train, **given)


class Quadratic(gt.Module):
    """L/2 x², whose minimum gradient descent finds below a learning rate of 2/L and leaves above it."""

    def __init__(self, curvature=4.0, lr=0.1, offset=0.0):
        super().__init__()
        self.x, self.curvature, self.lr, self.offset = nn.Parameter(torch.ones(())), curvature, lr, offset

    def training_step(self, batch, batch_idx):
        return self.curvature / 2 * self.x**2 + self.offset

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


# --- the learning rate: what is found ------------------------------------------------------------------------------------


def by_hand(module, batches, lrs):
    """The losses of a plain loop of SGD with momentum, with a learning rate for each step."""
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
def test_losses_are_those_of_a_loop_written_by_hand(mode):
    module = Net(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    same = copy.deepcopy(module)
    found = find(module, mode=mode, min_lr=1e-4, max_lr=1e-1)
    parts = [i / 29 for i in range(30)]
    lrs = [1e-4 * 1000**part if mode == "exponential" else 1e-4 + (1e-1 - 1e-4) * part for part in parts]
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


@pytest.mark.parametrize("curvature", [0.5, 4.0, 30.0])
def test_the_suggestion_lies_where_a_quadratic_converges(curvature):
    found = find(Quadratic(curvature), min_lr=1e-6, max_lr=100.0, num_training=150)
    suggestion, q, m = found.suggestion(), found.lrs[1] / found.lrs[0], found.losses.index(min(found.losses))
    assert suggestion < 2 / curvature
    # From below: with the loss beginning at l, a step k lowers it to no less than l (1 - 2 L sum of lr_i), and that sum is at most
    # lr_k q/(q-1). A slope of the average is at most w = 0.02/(1 - 0.98^11) of how far the loss lies below it; the steepest is at least
    # the mean slope from step 10 to the best.
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
    # Slopes are those between a point's two neighbours.
    assert found.suggestion() == found.lrs[14]
    assert found.suggestion(skip_begin=15) == found.lrs[15]
    assert found.suggestion(skip_begin=0) == found.lrs[0]
    assert found.suggestion(skip_end=0) == found.lrs[-1]


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([1.0] * 11, "only 11 steps had a loss, and 11 are not looked at"),
        ([1.0] * 30, "the loss fell nowhere between 1 and 30"),
        ([1.0 - 1e-9 * i for i in range(30)], "the loss fell nowhere"),
        ([float(i) for i in range(30)], "the loss fell nowhere"),
    ],
)
def test_no_suggestion_says_why(losses, why):
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


class Watch:
    """Keeps the learning rates of all groups in each step; it only wraps."""

    def __init__(self):
        self.lrs = []

    @hookimpl(wrapper=True)
    def optimizer_step(self, run, optimizer):
        self.lrs.append([float(group["lr"]) for group in optimizer.param_groups])
        return (yield)


def test_groups_keep_their_ratio_to_the_first():
    def two(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": torch.tensor(0.2)}, {"params": others, "lr": 0.02}], lr=1.0)

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
            return [optimizer], [{"scheduler": warm, "interval": "step"}, {"scheduler": plateau, "monitor": "never logged"}]

    watch = Watch()
    found = find(Scheduled(), options={"plugins": [watch]})
    assert [lr for (lr,) in watch.lrs] == found.lrs


def test_estimated_steps_are_those_of_the_finder():
    class OneCycle(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps), "interval": "step"}]

    assert len(find(OneCycle()).lrs) == 30


@pytest.mark.parametrize("offset", [0.0, -10.0])
def test_it_ends_where_the_loss_diverges(offset):
    found = find(Quadratic(offset=offset), min_lr=1e-3, max_lr=1e3, num_training=100)
    assert 20 < len(found.lrs) < 100
    best = min(found.losses[:-1])
    assert found.losses[-1] > best + 3 * abs(best)
    assert found.losses[-2] <= best + 3 * abs(best)
    assert f"{found.lrs[-1]:.3g}" in found.stopped


def test_one_lucky_batch_at_first_is_no_divergence():
    class Lucky(Net):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (1e-6 if self.global_step == 0 else 1)

    assert len(find(Lucky(), max_lr=0.1).lrs) == 30


def test_it_does_not_end_where_it_may_not():
    found = find(Quadratic(), min_lr=1e-3, max_lr=10.0, early_stop_threshold=None)
    assert len(found.lrs) == 30
    assert found.stopped == ""


def test_it_ends_where_the_loss_is_not_finite():
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
    lines = LRFinder("linear", [1.0, 2.0, 3.0, 4.0, 5.0], losses).plot(width=41, height=11).splitlines()
    assert [line[11:].find("*") for line in lines[:11]] == [40, -1, -1, -1, -1, 0, 10, -1, 20, -1, 30]
    assert LRFinder("linear").plot() == "nothing to draw"


# --- where it goes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lr", "learning_rate", "base"])
def test_the_suggestion_is_set(name):
    class Named(Quadratic):
        pass

    module = Named()
    module.lr, rate = 0.5, module.lr
    del module.lr
    setattr(module, name, rate)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=getattr(module, name))
    found = Tuner(trainer()).lr_find(module, loader(), min_lr=1e-4, attr_name="" if name != "base" else "base")
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
    with pytest.warns(UserWarning, match=r"Quadratic\.lr stays as it is, for there is no suggestion: the loss fell nowhere"):
        Tuner(trainer()).lr_find(module, loader(), num_training=20)
    assert module.lr == 0.1


# --- what stays as it was ------------------------------------------------------------------------------------------------


class Keeps(Net):
    """A module with everything that a run may change."""

    def __init__(self, stepped=True):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.3)
        self.tied = nn.Linear(4, 3)
        self.tied.weight.data.copy_(self.layers[0].weight.T)
        self.layers[0].bias.grad = torch.ones(4)
        self.generator = torch.Generator().manual_seed(3)
        self.random = random.Random(4)
        self.seen, self.table, self.best = [1], {"a": [torch.zeros(2)]}, torch.zeros(2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if stepped:  # so that it has a state
            for parameter in self.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
        self.lr = 0.01

    def loss(self, batch):
        x, y = batch
        noise = torch.randn(x.shape, generator=self.generator) * self.random.random()
        return nn.functional.mse_loss(self.layers(self.drop(self.norm(x + noise))), y)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        self.table["a"][0] += 1
        self.table["b"] = batch_idx
        self.best += 1
        self.extra = torch.ones(3)
        random.random()
        return super().training_step(batch, batch_idx)

    def on_fit_start(self):
        self.register_buffer("late", torch.ones(1))
        self.added = nn.Linear(1, 1)
        self.drop.eval()

    def configure_optimizers(self):
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        return [self.optimizer], [{"scheduler": scheduler, "interval": "step"}]


def snapshot(thing):
    """Everything in a module, as plain values that can be compared."""
    if isinstance(thing, torch.Tensor):
        gradient = None if thing.grad is None else thing.grad.tolist()
        return str(thing.dtype), str(thing.device), thing.data_ptr(), thing.detach().double().tolist(), gradient, thing.requires_grad
    if isinstance(thing, torch.Generator):
        return thing.get_state().tolist()
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, nn.Module | torch.optim.Optimizer):
        return {name: snapshot(value) for name, value in vars(thing).items()}
    if isinstance(thing, dict):
        return {id(key) if isinstance(key, torch.Tensor) else key: snapshot(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [snapshot(item) for item in thing]
    return thing


def randomness():
    return random.getstate(), torch.get_rng_state().tolist(), torch.rand(1).item(), random.random()


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-true"}, {"precision": "bf16-mixed", "seed": 5}], ids=str)
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(options, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    order = torch.Generator().manual_seed(7)
    data = DataLoader(samples(), batch_size=4, shuffle=True, generator=order)
    # Adam cannot go on with another dtype than that of its state.
    one, module = trainer(output=tmp_path / "out", **options), Keeps(stepped=options.get("precision") != "bf16-true")
    earlier = module._trainer = trainer()
    before, drawn, random_before = snapshot(module), order.get_state().tolist(), random.getstate()
    torch_before = torch.get_rng_state().tolist()
    if fails:
        monkeypatch.setattr(Keeps, "on_train_epoch_end", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Tuner(one).lr_find(module, data, update_attr=False)
    else:
        Tuner(one).lr_find(module, data, num_training=20, update_attr=False)
    after = snapshot(module)
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} == set()
    assert order.get_state().tolist() == drawn
    assert random.getstate() == random_before
    assert torch.get_rng_state().tolist() == torch_before
    assert module.trainer is earlier
    assert (one.global_step, one.current_epoch, one.callback_metrics) == (0, 0, {})
    assert list(tmp_path.iterdir()) == []


def test_a_fit_afterwards_is_bit_equal_to_one_without_a_finder():
    def train(tune):
        torch.manual_seed(3)
        module, one = Keeps(), trainer(max_epochs=2)
        data = DataLoader(samples(), batch_size=4, shuffle=True)
        if tune:
            Tuner(one).lr_find(module, data, update_attr=False)
        one.fit(module, data)
        return module.state_dict(), one.global_step

    (without, steps), (with_it, also) = train(False), train(True)
    assert steps == also == 12
    assert without.keys() == with_it.keys()
    assert all(torch.equal(without[name], with_it[name]) for name in without)


def test_numpy_s_generator_and_arrays_are_as_they_were():
    numpy = pytest.importorskip("numpy")

    class Draws(Net):
        def training_step(self, batch, batch_idx):
            self.counts[0] += numpy.random.rand()
            return super().training_step(batch, batch_idx)

    module = Draws()
    module.counts = numpy.zeros(2)
    numpy.random.seed(1)
    find(module)
    state = numpy.random.rand()
    numpy.random.seed(1)
    assert state == numpy.random.rand()
    assert module.counts.tolist() == [0, 0]


def test_shared_and_expanded_tensors_stay_shared():
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(3, 4)
            self.other.weight = self.layers[0].weight
            self.register_buffer("wide", torch.zeros(1).expand(5))
            self.loop = []
            self.loop.append(self.loop)

    module = Tied()
    find(module)
    assert module.other.weight is module.layers[0].weight
    assert module.wide.tolist() == [0] * 5
    assert module.loop[0] is module.loop


def test_a_data_module_keeps_what_it_had():
    class Data(gt.DataModule):
        def __init__(self, batch_size=4):
            self.generator, self.batch_size = torch.Generator().manual_seed(1), batch_size

        def setup(self, stage):
            self.made = samples()

        def train_dataloader(self):
            return DataLoader(self.made, batch_size=self.batch_size, shuffle=True, generator=self.generator)

    data = Data()
    state = data.generator.get_state().tolist()
    Tuner(trainer()).lr_find(Net(), data, num_training=13, update_attr=False)
    assert not hasattr(data, "made")
    assert data.trainer is None
    assert data.generator.get_state().tolist() == state


# --- a finder is no run --------------------------------------------------------------------------------------------------


def test_plugins_that_watch_are_left_out_and_named(capsys, tmp_path):
    class Watches(Callback):
        def on_train_batch_end(self, *_):
            raise AssertionError("a finder is no run")

    class Both(Watch):
        @hookimpl
        def on_step_end(self):
            raise AssertionError("a finder is no run")

    logger, watch, ema = Loggers(), Watch(), EMA(0.9)
    one = trainer(
        plugins=["csv", logger, watch, Both()],
        callbacks=[Watches(), EarlyStopping("loss"), ema],
        plugin_options={"csv": {"path": str(tmp_path / "metrics.csv")}},
        max_time=1e-6,
    )
    tuner = Tuner(one)
    tuner.lr_find(Net(), loader(), num_training=13, update_attr=False)
    said = capsys.readouterr().err
    assert said.count("tune: left out while finding") == 1
    for label in ("geartrain[csv]", "Loggers", "Both", "Watches", "early_stopping", "ema", "timer"):
        assert label.lower() in said.lower(), said
    assert "Watch," not in said
    assert logger.lines == []
    assert list(tmp_path.iterdir()) == []
    assert len(watch.lrs) == 13
    tuner.lr_find(Net(), loader(), num_training=13, update_attr=False)
    assert capsys.readouterr().err == ""


def test_a_plugin_that_replaces_an_owner_is_kept_although_it_watches():
    class Halves:
        replaces = frozenset({"backward"})
        steps = 0

        @hookimpl
        def backward(self, run, loss):
            (loss / 2).backward()

        @hookimpl
        def on_step_end(self):
            self.steps += 1

    halves = Halves()
    find(Net(), options={"plugins": [halves]})
    assert halves.steps == 30


def test_neither_validation_nor_a_bar_nor_a_table(capsys):
    class Validates(Net):
        def validation_step(self, batch, batch_idx):
            raise AssertionError("a finder does not validate")

        def val_dataloader(self):
            return loader()

    options = {"enable_progress_bar": True, "num_sanity_val_steps": 2, "val_check_interval": 2, "max_epochs": 1, "max_steps": 2}
    assert len(find(Validates(), options=options).lrs) == 30
    assert capsys.readouterr() == ("", "")


# --- refusals ------------------------------------------------------------------------------------------------------------


class Never(Net):
    """One that must not be set up: what is wrong is said before."""

    lr = 0.1

    def setup(self, stage):
        raise AssertionError("something was started")


LR_REFUSALS = [
    ({"mode": "cubic"}, {}, "'exponential' or 'linear'"),
    ({"num_training": 12}, {}, "at least 13"),
    ({"num_training": 50.0}, {}, "whole number"),
    ({"min_lr": 0.0}, {}, "above 0"),
    ({"min_lr": 1.0, "max_lr": 0.1}, {}, "the first below the second"),
    ({"max_lr": math.inf}, {}, "above 0"),
    ({"early_stop_threshold": 1.0}, {}, "must be above 1"),
    ({"update_attr": True, "attr_name": "rate"}, {}, "Never has no rate to set. Fix: update_attr=False"),
    ({}, {"fast_dev_run": True}, "fast_dev_run"),
]


@pytest.mark.parametrize(("arguments", "options", "says"), LR_REFUSALS, ids=str)
def test_lr_find_refuses(arguments, options, says):
    with pytest.raises(UsageError, match=says):
        find(Never(), options=options, **arguments)


def test_an_iterator_would_be_used_up():
    batches = iter(loader())
    with pytest.raises(UsageError, match="use up"):
        find(Never(), batches)
    assert len(list(batches)) == 6


def test_weights_without_a_shape_and_plain_modules_are_refused():
    module = Never()
    module.lazy = nn.LazyLinear(3)
    with pytest.raises(UsageError, match=r"lazy\.weight has no shape yet"):
        find(module)
    with pytest.raises(UsageError, match=r"Linear is a plain nn\.Module"):
        find(nn.Linear(1, 1))


@pytest.mark.parametrize("optimizer", [lambda p: None, lambda p: torch.optim.SGD(p, lr=0.0)])
@pytest.mark.filterwarnings("ignore:configure_optimizers returned None")
def test_no_learning_rate_to_vary(optimizer):
    with pytest.raises(TrainingError, match="the learning rate to vary"):
        find(Net(optimizer))


# --- the batch size ------------------------------------------------------------------------------------------------------


class Data(gt.DataModule):
    def __init__(self, batch_size=5, n=1000):
        self.batch_size, self.n = batch_size, n

    def train_dataloader(self):
        return DataLoader(samples(self.n), batch_size=self.batch_size)


class Room(Net):
    """One that has room for so many samples."""

    def __init__(self, room=100, error=MemoryError):
        super().__init__()
        self.room, self.error = room, error

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > self.room:
            raise self.error(f"no room for {len(batch[0])}")
        return super().training_step(batch, batch_idx)


def scale(module, data=None, options=None, **arguments):
    tuner = Tuner(trainer(**(options or {})))
    found = tuner.scale_batch_size(module, Data() if data is None else data, **arguments)
    return found, [trial.batch_size for trial in tuner.trials], tuner


SEARCHES = [
    ("power", {}, 64, [2, 4, 8, 16, 32, 64, 128], "128 does not run"),
    ("binsearch", {}, 100, [2, 4, 8, 16, 32, 64, 128, 96, 112, 104, 100, 102, 101], "101 does not run"),
    ("power", {"init_val": 100}, 100, [100, 200], "200 does not run"),
    ("power", {"init_val": 450}, 56, [450, 225, 112, 56], "112 does not run"),
    ("binsearch", {"init_val": 450}, 100, [450, 225, 112, 56, 84, 98, 105, 101, 99, 100], "101 does not run"),
    ("power", {"max_trials": 3}, 8, [2, 4, 8], "3 sizes were tried"),
    ("binsearch", {"max_trials": 9}, 96, [2, 4, 8, 16, 32, 64, 128, 96, 112], "9 sizes were tried"),
]


@pytest.mark.parametrize(("mode", "arguments", "expected", "tried", "reason"), SEARCHES, ids=str)
def test_search(mode, arguments, expected, tried, reason):
    data = Data()
    found, sizes, tuner = scale(Room(), data, mode=mode, **arguments)
    assert (found, sizes) == (expected, tried)
    assert reason in tuner.reason
    assert (data.batch_size, data.hparams.batch_size) == (expected, expected)
    for trial in tuner.trials:
        assert trial.ran == (trial.batch_size <= 100)
        assert (trial.samples_per_second or 0) > 0 if trial.ran else trial.samples_per_second is None
        assert trial.error == ("" if trial.ran else f"no room for {trial.batch_size}")


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_search_ends_at_all_the_data(mode):
    found, sizes, tuner = scale(Room(10**6), Data(n=37), mode=mode)
    assert (found, sizes) == (37, [2, 4, 8, 16, 32, 37])
    assert tuner.reason == "37 samples are all that there are"
    assert scale(Room(10**6), Data(n=37), mode=mode, init_val=50)[0] == 37


def test_a_loader_without_length_ends_where_a_batch_is_not_full():
    class Streams(Room):
        batch_size = 4

        def train_dataloader(self):
            return Stream([samples(self.batch_size)[:] if self.batch_size <= 20 else samples(20)[:]])

    tuner = Tuner(trainer())
    module = Streams(10**6)
    assert tuner.scale_batch_size(module) == module.batch_size == 20
    assert [trial.batch_size for trial in tuner.trials] == [2, 4, 8, 16, 32]


def test_not_even_one_sample():
    module, data = Room(0), Data()
    with pytest.raises(TrainingError, match=r"no batch size runs: 1 ran out of memory too \(no room for 1\)"):
        scale(module, data)
    assert data.batch_size == 5


def test_each_trial_is_so_many_steps_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lengths = []

    class Counts(Room):
        def __init__(self):
            super().__init__()
            self.steps = 0

        def training_step(self, batch, batch_idx):
            self.steps += 1
            lengths.append((len(batch[0]), self.steps))
            return super().training_step(batch, batch_idx)

    module, data, watch = Counts(), Data(), Watch()
    before, drawn = snapshot(module), torch.get_rng_state().tolist()
    scale(module, data, {"plugins": [watch], "output": "out", "limit_train_batches": 1}, init_val=50, steps_per_trial=4)
    assert lengths == [*[(50, i) for i in (1, 2, 3, 4)], *[(100, i) for i in (1, 2, 3, 4)], (200, 1)]
    assert snapshot(module) == before
    assert torch.get_rng_state().tolist() == drawn
    assert list(tmp_path.iterdir()) == []


def test_other_errors_come_as_they_are():
    module, data = Room(error=KeyError), Data()
    before = snapshot(module)
    with pytest.raises(KeyError, match="no room for 128"):
        scale(module, data)
    assert snapshot(module) == before
    assert (data.batch_size, data.hparams.batch_size) == (5, 5)


def test_a_failed_trial_keeps_nothing_alive():
    alive = []

    class Grows(Room):
        def training_step(self, batch, batch_idx):
            gc.disable()
            activations = torch.zeros(len(batch[0]), 10)
            assert [ref() for ref in alive if ref() is not None] == []
            if batch_idx == 0:
                alive.append(weakref.ref(activations))
            activations.cycle = [activations] if len(batch[0]) > 100 else None
            return super().training_step(batch, batch_idx)

    try:
        assert scale(Grows(), mode="binsearch", steps_per_trial=1)[0] == 100
    finally:
        gc.enable()
    assert len(alive) == 13


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    OSError(12, "Cannot allocate memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"),
    RuntimeError("std::bad_alloc"),
]
ANOTHER = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"),
    ValueError("out of memory"),
    OSError(2, "No such file"),
    KeyError("memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_out_of_memory(error):
    assert is_out_of_memory(error)
    wrapped = TrainingError("the batch could not be made")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize("error", ANOTHER, ids=str)
def test_another_error(error):
    assert not is_out_of_memory(error)


def test_memory_that_really_runs_out():
    """256 MiB of address space more than torch takes, in a process of its own, and samples that need one or more each."""
    program = """
        import resource, sys
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        import geartrain as gt
        from geartrain.tuning import Tuner

        class Wide(gt.Module):
            batch_size = 1
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 2**18)
            def training_step(self, batch, batch_idx):
                return self.layer(batch[0]).square().mean()
            def train_dataloader(self):
                return DataLoader(TensorDataset(torch.randn(4096, 4)), batch_size=self.batch_size)
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        torch.set_num_threads(1)
        options = dict(accelerator="cpu", enable_progress_bar=False, max_steps=2)
        gt.Trainer(**options).fit(Wide())  # what torch loads and allocates at first
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        found = {}
        for mode in ("power", "binsearch"):
            module = Wide()
            before = {name: value.clone() for name, value in module.state_dict().items()}
            tuner = Tuner(gt.Trainer(**options))
            found[mode] = tuner.scale_batch_size(module, mode=mode)
            assert module.batch_size == found[mode]
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
            assert any("allocate memory" in trial.error for trial in tuner.trials), tuner.trials
            gt.Trainer(**options).fit(module)  # what was found does run, after all that failed
            del before
        module.batch_size = 2 * found["binsearch"]
        try:
            gt.Trainer(**options).fit(module)
        except RuntimeError as error:
            assert "allocate memory" in str(error), error
        else:
            raise SystemExit("twice the size runs too")
        print(found["power"], found["binsearch"])
    """
    if sys.platform != "linux":
        pytest.skip("needs RLIMIT_AS and /proc")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    power, binsearch = map(int, done.stdout.split())
    # A sample takes 1 MiB in the output, and once or twice as much again in backward.
    assert power & (power - 1) == 0
    assert 8 <= power <= binsearch < 2 * power
    assert binsearch < 256


def test_where_the_batch_size_is():
    class Both(Room):
        def __init__(self, batch_size=3):
            super().__init__()
            self.batch_size = batch_size

        def train_dataloader(self):
            return DataLoader(samples(1000), batch_size=self.batch_size)

    class Only(Room):
        def train_dataloader(self):
            return DataLoader(samples(1000), batch_size=self.trainer.datamodule.batch_size)

    class Other(gt.DataModule):
        def __init__(self, batch_size=1):
            self.batch_size = batch_size

    class Hyper(gt.DataModule):
        def __init__(self, size=1):
            pass

        def train_dataloader(self):
            return DataLoader(samples(1000), batch_size=self.hparams.size)

    module = Both()
    assert Tuner(trainer()).scale_batch_size(module) == module.batch_size == module.hparams.batch_size == 64
    module, data = Both(), Data()
    assert scale(module, data)[0] == data.batch_size == 64
    assert module.batch_size == 3
    module, data = Both(), Other()
    assert scale(module, data)[0] == module.batch_size == 64
    data = Other()
    assert scale(Only(), data)[0] == data.batch_size == 64
    data = Hyper()
    assert scale(Room(), data, batch_arg_name="size")[0] == data.hparams.size == 64


def test_a_batch_size_that_nobody_reads():
    class Fixed(Data):
        def train_dataloader(self):
            return DataLoader(samples(1000), batch_size=32)

    class FixedStream(Data):
        def train_dataloader(self):
            return Stream([samples(32)[:]])

    for data in (Fixed(), FixedStream()):
        says = rf"{type(data).__name__}\.batch_size is 2, and the training loader has batches of 32.*batch_size=self\.batch_size"
        with pytest.raises(UsageError, match=says):
            scale(Room(), data)
        assert data.batch_size == 5


class NoSize(gt.DataModule):
    def train_dataloader(self):
        raise AssertionError("something was started")


class Fixed(Data):
    batch_size = property(lambda self: 4)

    def __init__(self):
        pass


BATCH_REFUSALS = [
    ({"mode": "bisect"}, {}, "'power' or 'binsearch'"),
    ({"init_val": 0}, {}, "init_val=0 must be a whole number, at least 1"),
    ({"max_trials": True}, {}, "max_trials=True"),
    ({"steps_per_trial": 1.5}, {}, r"steps_per_trial=1\.5"),
    ({"data": NoSize()}, {}, "there is no 'batch_size' to set on NoSize and Never. Fix: self.batch_size"),
    ({"data": Fixed()}, {}, r"Fixed\.batch_size cannot be set.*Fix: an attribute"),
    ({"batch_arg_name": "size"}, {}, "there is no 'size'"),
    ({}, {"fast_dev_run": True}, "fast_dev_run"),
]


@pytest.mark.parametrize(("arguments", "options", "says"), BATCH_REFUSALS, ids=str)
def test_scale_batch_size_refuses(arguments, options, says):
    with pytest.raises(UsageError, match=says):
        scale(Never(), options=options, **arguments)


def test_progress_is_one_line_a_trial(capsys):
    scale(Room(10), options={"enable_progress_bar": True})
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"batch size {n}" for n in (2, 4, 8, 16)]
    assert lines[0].endswith("samples/s")
    assert lines[-1] == "batch size 16: out of memory"
