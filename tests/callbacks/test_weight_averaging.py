"""WeightAveraging and EMAWeightAveraging: Lightning's rules, and torch's AveragedModel."""

import pickle

import pytest
import torch
from small_models import EvalNet, Net, assert_equal, differ, fit, loader, trainer, weights
from threads import on_threads
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from geartrain import TrainingError, hookimpl
from geartrain.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging


class Reference:
    """Update torch's AveragedModel after the steps, and the ends of epochs, that are given."""

    def __init__(self, steps=(), epochs=(), **options):
        self.steps, self.epochs, self.options = steps, epochs, {"use_buffers": True, **options}

    @hookimpl
    def on_run_start(self, run):
        self.model, self.trained = AveragedModel(run.module, **self.options), []

    @hookimpl
    def on_step_end(self, run):
        self.trained.append(weights(run.module))
        if run.step - 1 in self.steps:
            self.model.update_parameters(run.module)

    @hookimpl
    def on_epoch_end(self, run):
        if run.epoch in self.epochs:
            self.model.update_parameters(run.module)


class Norm(EvalNet):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def check(callback, reference, module=None):
    """Train 2 epochs of 6 steps; compare the module's weights with torch's."""
    module = Net() if module is None else module
    fit(module, callbacks=[callback], plugins=[reference], max_epochs=2)
    expected = reference.model.module.state_dict()
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(weight, expected[name], msg=name)
    return module


EMA_OF_TORCH = get_ema_avg_fn(0.8)


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({}, range(12), ()),
        ({"update_every_n_steps": 3}, (0, 3, 6, 9), ()),
        ({"update_starting_at_step": 5}, range(5, 12), ()),
        ({"update_every_n_steps": 4, "update_starting_at_step": 5}, (8,), ()),
        ({"update_starting_at_step": 99, "update_starting_at_epoch": 0}, (), (0, 1)),
        ({"update_every_n_steps": 4, "update_starting_at_epoch": 1}, (0, 4, 8), (1,)),
    ],
)
def test_ema_updates_after_the_steps_and_epochs_of_its_options(options, steps, epochs):
    callback = EMAWeightAveraging(decay=0.8, **options)
    check(callback, Reference(steps, epochs, avg_fn=EMA_OF_TORCH))
    assert callback.updates == len(steps) + len(epochs)


class EverySecond(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and step_idx % 2 == 1


class EachEpoch(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None


def multi(averages, current, number):
    torch._foreach_lerp_(averages, current, 0.5)


@pytest.mark.parametrize(
    ("callback", "reference"),
    [
        (WeightAveraging(), Reference(range(12))),
        (EverySecond(), Reference(range(1, 12, 2))),
        (EachEpoch(), Reference(epochs=(0, 1))),
        (WeightAveraging(avg_fn=EMA_OF_TORCH), Reference(range(12), avg_fn=EMA_OF_TORCH)),
        (WeightAveraging(multi_avg_fn=multi), Reference(range(12), avg_fn=get_ema_avg_fn(0.5))),
        (WeightAveraging(device="cpu"), Reference(range(12))),
    ],
    ids=["default", "steps", "epochs", "avg_fn", "multi_avg_fn", "device"],
)
def test_a_rule_and_a_function(callback, reference):
    check(callback, reference)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_buffers(use_buffers):
    reference = Reference(range(12), use_buffers=use_buffers)
    reference.options["avg_fn"] = lambda average, weight, number: (
        torch.lerp(average, weight, 1 / (number + 1)) if weight.is_floating_point() else weight
    )
    module = check(WeightAveraging(use_buffers=use_buffers), reference, Norm())
    trained = reference.trained[-1]["layers.1.running_mean"]
    assert torch.equal(module.layers[1].running_mean, trained) is not use_buffers


def test_validation_uses_the_average_once_there_is_one():
    class Sees(EvalNet):
        def on_validation_start(self):
            self.validated = [*getattr(self, "validated", []), weights(self)]

    reference, module = Reference(range(7, 12)), Sees()
    callback = WeightAveraging()
    callback.should_update = lambda step_idx=None, epoch_idx=None: (step_idx or 0) >= 7
    plugins = {"callbacks": [callback], "plugins": [reference]}
    fit(module, val=loader(4), max_epochs=2, **plugins)
    assert_equal(module.validated[0], reference.trained[5])
    assert differ(module.validated[1], reference.trained[11])
    assert_equal(module.validated[1], module)


@pytest.mark.parametrize("make", [EMAWeightAveraging, EachEpoch, EverySecond])
@pytest.mark.parametrize("step", [6, 8])
def test_a_run_resumes_bit_for_bit(tmp_path, make, step):
    def go(folder, path=None):
        torch.manual_seed(1)
        module, callback = EvalNet(), make()
        saves = ModelCheckpoint(
            dirpath=tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1
        )
        one = trainer(max_epochs=3, callbacks=[callback, saves], seed=2)
        one.fit(module, loader(shuffle=True), loader(4), ckpt_path=path)
        return module, callback.updates

    whole, updates = go("whole")
    rest = go("rest", tmp_path / "whole" / f"step={step}.ckpt")
    assert_equal(rest[0], whole)
    assert rest[1] == updates


def test_it_can_be_sent_to_another_process():
    again = pickle.loads(pickle.dumps(EMAWeightAveraging(decay=0.5)))
    check(again, Reference(range(12), avg_fn=get_ema_avg_fn(0.5)))


def on_ranks(callback):
    one, strategy = on_threads(callbacks=[callback], max_epochs=2)
    one.fit(Norm(), loader(16, 4), loader(8, 4))
    return [weights(run.module) for run in strategy.runs]


def test_every_rank_has_the_same_average():
    first, second = on_ranks(EMAWeightAveraging(decay=0.5))
    assert_equal(first, second)


class OnOneRank(WeightAveraging):
    rank = None

    @hookimpl(specname="on_epoch_start")
    def _note_rank(self, run):
        self.rank = run.world.rank

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and self.rank == 0


def test_ranks_that_average_differently_are_named_before_they_hang():
    message = r"callbacks\[weight_averaging\]: the ranks have made \[2, 0\] updates.*Fix: let"
    with pytest.raises(TrainingError, match=message):
        on_ranks(OnOneRank())
