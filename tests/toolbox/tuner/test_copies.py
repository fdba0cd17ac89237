"""A finder trains copies: it changes nothing, and plugins that watch a run do not see it."""

import random

import pytest
import torch
from small_models import Loggers, Net, loader, samples, trainer
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import geartrain as gt
from geartrain import UsageError, hookimpl
from geartrain.callbacks import EMA, Callback, EarlyStopping
from geartrain.tuning import Tuner

from .cases import Keeps, Never, Watch, find, scale, snapshot


@pytest.mark.parametrize(
    ("options", "fails"),
    [
        ({}, True),
        ({"precision": "bf16-true"}, False),
        ({"precision": "bf16-mixed", "seed": 5}, False),
    ],
    ids=str,
)
def test_a_finder_leaves_no_changes(options, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    order = torch.Generator().manual_seed(7)
    data = DataLoader(samples(), batch_size=4, shuffle=True, generator=order)
    # Adam needs the dtype of its saved state.
    one, module = (
        trainer(output=tmp_path / "out", **options),
        Keeps(stepped=options.get("precision") != "bf16-true"),
    )
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


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 4}, {"batch_size": None, "shuffle": True}],
    ids=str,
)
def test_a_loaders_generator_is_restored(options):
    order = torch.Generator().manual_seed(7)
    state = order.get_state().tolist()
    data = DataLoader(samples(), generator=order, **options)
    find(Net(), data)
    assert order.get_state().tolist() == state
    list(data)
    assert order.get_state().tolist() != state


def test_numpys_generator_and_arrays_are_restored():
    numpy = pytest.importorskip("numpy")

    class Draws(Net):
        def training_step(self, batch, batch_idx):
            self.counts[0] += numpy.random.rand() + self.dice.random()
            return super().training_step(batch, batch_idx)

    module = Draws()
    module.counts, module.scalar, module.fixed = numpy.zeros(2), numpy.float64(1), numpy.ones(1)
    module.fixed.flags.writeable = False
    module.dice = numpy.random.default_rng(3)
    numpy.random.seed(1)
    find(module)
    state = numpy.random.rand()
    numpy.random.seed(1)
    assert state == numpy.random.rand()
    assert module.counts.tolist() == [0, 0]
    assert module.dice.random() == numpy.random.default_rng(3).random()


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


def test_a_data_module_keeps_its_attributes():
    class Data(gt.DataModule):
        def __init__(self, batch_size=4):
            self.generator, self.batch_size = torch.Generator().manual_seed(1), batch_size

        def setup(self, stage):
            self.made = samples()

        def train_dataloader(self):
            return DataLoader(
                self.made, batch_size=self.batch_size, shuffle=True, generator=self.generator
            )

    data = Data()
    state = data.generator.get_state().tolist()
    Tuner(trainer()).lr_find(Net(), data, num_training=13, update_attr=False)
    assert not hasattr(data, "made")
    assert data.trainer is None
    assert data.generator.get_state().tolist() == state


def test_weights_without_a_shape_keep_none():
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.layers[0] = nn.LazyLinear(4)

    module = Lazy()
    assert len(find(module).lrs) == 30
    assert isinstance(module.layers[0].weight, nn.UninitializedParameter)


# --- modules that cannot be copied ----------------------------------------------------------------


class NotCopied:
    def __deepcopy__(self, memo):
        raise TypeError("no copy of me")


@pytest.mark.parametrize(
    "value",
    [random.SystemRandom(), NotCopied(), torch.ones(1, requires_grad=True) * 2],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("finds", [find, scale])
def test_a_module_that_cannot_be_copied_is_refused(finds, value):
    module = Never()
    module.batch_size, module.value = 2, value
    with pytest.raises(UsageError, match=r"Never cannot be copied: \w+: .*Fix: make in setup\(\)"):
        finds(module)


def with_a_hook(module):
    module.layers[0].register_forward_hook(
        lambda layer, inputs, output: output * module.layers[2].bias
    )


def with_a_closure(module):
    module.penalty = lambda: module.layers[0].weight.square().sum()


def with_a_global(module):
    module.configure_optimizers = the_parameters


module_of_the_script = Net()


def the_parameters():
    return torch.optim.SGD(module_of_the_script.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (with_a_hook, r"layers\.0\._forward_hooks"),
        (with_a_closure, "penalty"),
        (with_a_global, "configure_optimizers"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_that_refers_to_the_module_is_refused(change, name, monkeypatch):
    module = Never()
    monkeypatch.setitem(globals(), "module_of_the_script", module)
    change(module)
    with pytest.raises(
        UsageError,
        match=rf"the function in {name} refers to the module itself. Fix: use a method of the",
    ):
        find(module)
    monkeypatch.setitem(globals(), "module_of_the_script", Net())
    module = Net()
    module.penalty = lambda: 1.0
    assert len(find(module).lrs) == 30


def test_a_module_with_a_metric_of_torchmetrics_is_tuned():
    class Measured(Net):
        def __init__(self):
            super().__init__()
            self.seen = MeanMetric()

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.seen.update(loss.detach())
            return loss

    module = Measured()
    Tuner(trainer()).lr_find(module, loader(), num_training=20, update_attr=False)
    assert module.seen.update_count == 0


def test_a_batch_size_is_not_found_beside_the_module_on_a_device():
    module = Never()
    module.batch_size = 2
    with pytest.raises(
        UsageError, match=r"Never is on meta, and a finder trains a copy of it.*Fix: model\.cpu\(\)"
    ):
        scale(module.to("meta"))


def test_a_module_and_its_data_module_are_copied_together():
    class Refers(Net):
        def train_dataloader(self):
            return DataLoader(samples(40), batch_size=self.data.batch_size)

    class Rest(gt.DataModule):
        batch_size = 2

    module, data = Refers(), Rest()
    module.data = data
    found, _, _ = scale(module, data)
    assert found == data.batch_size == 40
    assert module.data is data


# --- a finder is not a run ------------------------------------------------------------------------


def test_plugins_that_watch_are_left_out_and_named(capsys, tmp_path):
    class Watches(Callback):
        def on_train_batch_end(self, *_):
            raise AssertionError("a finder is not a run")

    class Both(Watch):
        @hookimpl
        def on_step_end(self):
            raise AssertionError("a finder is not a run")

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
    assert said.count("tune: plugins that watch a run are left out") == 1
    for label in (
        "geartrain-callbacks[csv]",
        "Loggers",
        "Both",
        "Watches",
        "early_stopping",
        "ema",
        "timer",
    ):
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

    options = {
        "enable_progress_bar": True,
        "num_sanity_val_steps": 2,
        "val_check_interval": 2,
        "max_epochs": 1,
        "max_steps": 2,
    }
    assert len(find(Validates(), options=options).lrs) == 30
    assert capsys.readouterr() == ("", "")
