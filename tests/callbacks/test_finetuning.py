"""backbone_finetuning and its base class: which parameters train when, also after a resume."""

from typing import ClassVar

import pytest
import torch
from small_models import assert_equal, loader, trainer, weights
from torch import nn

import geartrain as gt
from geartrain import UsageError
from geartrain.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from geartrain.testing import ThreadRanks

from ..swarm import pools


class Net(gt.Module):
    def __init__(self, scheduler="", interval="epoch"):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)
        self.seen, self.rates, self.scheduler = [], [], scheduler
        self.interval = interval

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.head(self.backbone(x)), y)

    def on_train_epoch_end(self):
        self.seen.append(weights(self))
        (optimizer,) = self.trainer.optimizers
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def configure_optimizers(self):
        trained = (p for p in self.parameters() if p.requires_grad)
        optimizer = torch.optim.Adam(trained, lr=0.01)
        if not self.scheduler:
            return optimizer
        scheduler = pools.scheduler_of(self.scheduler, optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


def run(callback, epochs=4, strategy="single", plugins=(), net=None, **options):
    net = net or Net()
    given = {"callbacks": [callback], "strategy": strategy, "plugins": list(plugins)}
    trainer(max_epochs=epochs, seed=1, **given).fit(net, loader(shuffle=True), **options)
    return net


def changed(net, epoch, name):
    before = net.seen[epoch - 1] if epoch else weights(Net())
    return not torch.equal(before[name], net.seen[epoch][name])


@pytest.mark.parametrize("strategy", ["single", ThreadRanks(2)])
def test_the_backbone_trains_from_its_epoch_on(strategy):
    net = run(BackboneFinetuning(2), strategy=strategy)
    assert [changed(net, e, "backbone.0.weight") for e in range(4)] == [False, False, True, True]
    assert [changed(net, e, "backbone.1.weight") for e in range(4)] == [True] * 4
    assert [changed(net, e, "head.weight") for e in range(4)] == [True] * 4
    assert net.rates == [[0.01], [0.01], [0.01, 0.001], [0.01, 0.002]]


def test_batch_norm_stays_frozen_on_request():
    net = run(BackboneFinetuning(1, train_bn=False), epochs=2)
    assert [changed(net, e, "backbone.1.weight") for e in (0, 1)] == [False, False]
    assert [changed(net, e, "backbone.1.running_mean") for e in (0, 1)] == [False, True]


def test_the_rate_grows_as_asked():
    rates = run(BackboneFinetuning(0, lambda epoch: 5.0, backbone_initial_lr=0.001)).rates
    assert [rate[-1] for rate in rates] == pytest.approx([0.001, 0.005, 0.01, 0.01])
    free = BackboneFinetuning(0, lambda epoch: 5.0, 0.2, should_align=False)
    assert [rate[-1] for rate in run(free, 3).rates] == pytest.approx([0.002, 0.01, 0.05])


@pytest.mark.parametrize("scheduler", ["", "StepLR", "SequentialLR(LambdaLR,StepLR)"])
def test_a_run_that_resumes_trains_the_same(tmp_path, scheduler):
    def once(folder, **options):
        every = {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1}
        saver = ModelCheckpoint(dirpath=folder, **every)
        return run(BackboneFinetuning(1), 3, plugins=[saver], net=Net(scheduler), **options)

    whole = once(tmp_path / "whole")
    for step in (4, 6, 8):  # before, at and after the change
        resumed = once(tmp_path / str(step), ckpt_path=tmp_path / "whole" / f"step={step}.ckpt")
        assert_equal(resumed, whole)
        assert resumed.rates[-1] == whole.rates[-1]


def test_a_checkpoint_of_weights_starts_frozen(tmp_path):
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    run(BackboneFinetuning(1), 2, plugins=[saver])
    net = run(BackboneFinetuning(1), 1, checkpoint=tmp_path / "epoch=1.ckpt")
    assert len(net.rates[0]) == 1


class Own(BaseFinetuning):
    """Freezes the first layer, and trains it with the whole backbone from epoch 1 on."""

    def freeze_before_training(self, pl_module):
        self.freeze([pl_module.backbone[0], {"more": pl_module.backbone[2]}], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


def test_the_users_own_rule():
    with pytest.warns(UserWarning, match="2 of 6 unfrozen parameters are in a group of Adam"):
        net = run(Own(), 2)
    assert net.rates == [[0.01], [0.01, 0.001]]
    assert [changed(net, e, "backbone.2.weight") for e in (0, 1)] == [False, True]


def test_parameters_are_found_once():
    tied = nn.Linear(2, 2)
    two = nn.ModuleDict({"a": tied, "b": nn.Sequential(tied, nn.BatchNorm1d(2))})
    assert len(list(BaseFinetuning.filter_params(two))) == 4
    assert len(list(BaseFinetuning.filter_params(two, train_bn=False))) == 2
    assert not list(BaseFinetuning.filter_params(two, requires_grad=False))
    assert len(BaseFinetuning.flatten_modules([two["b"], [tied]])) == 3


def test_a_strategy_that_waits_for_each_gradient_is_refused():
    class Waits(ThreadRanks):
        capabilities: ClassVar = {**ThreadRanks.capabilities, "unused_parameters": False}

    with pytest.raises(UsageError, match=r"waits for the gradient of each\. Fix: find_unused"):
        run(BackboneFinetuning(1), strategy=Waits(2))


def refusal(net, callback=None, epochs=4):
    """Train; return the error with which the run was refused before its first batch, or ``""``."""
    steps, text = [], ""
    net.on_train_batch_start = lambda *_: steps.append(1)
    try:
        run(callback or BackboneFinetuning(1, lambda epoch: 1.0), epochs, net=net)
    except UsageError as error:
        text = str(error)
    assert bool(text) != bool(steps)
    assert not text or "Fix: another " in text
    return text


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", pools.nested())
def test_a_scheduler_keeps_the_share_of_the_new_groups_rate_or_is_refused(name, interval):
    nests = f"ChainedScheduler({name},StepLR)", f"SequentialLR({name},LinearLR)"
    texts = (
        [name] if interval == "step" else [*nests, f"SequentialLR(StepLR,ChainedScheduler({name}))"]
    )
    for text in filter(pools.torch_can, texts):
        net = Net(text, interval)
        if name in ("CyclicLR", "OneCycleLR", "SWALR"):  # they keep more for each group
            assert name in refusal(net), text
        else:
            assert not refusal(net), text
            assert [len(rates) for rates in net.rates] == [1, 2, 2, 2]
            for first, new in net.rates[1:]:
                assert new == pytest.approx(first / 10, abs=1e-15), text


@pytest.mark.parametrize("scheduler", ["StepLR", "LambdaLR"])
def test_the_rate_grows_under_a_scheduler(scheduler):
    rates = run(BackboneFinetuning(1), 6, net=Net(scheduler)).rates
    assert [new / first for first, new in rates[1:]] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])


def test_functions_for_each_group_are_refused():
    class Two(Net):
        def configure_optimizers(self):
            groups = [{"params": list(self.head.parameters())}]
            groups.append({"params": [p for p in self.backbone.parameters() if p.requires_grad]})
            optimizer = torch.optim.SGD(groups, 0.1)
            factors = [lambda epoch: 1.0, lambda epoch: 0.5]
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, factors)]

    assert "LambdaLR takes no group" in refusal(Two())


class Optimized(Net):
    """Has an optimizer of torch, also SparseAdam, which steps the table alone."""

    def __init__(self, name):
        super().__init__()
        self.name, self.table = name, nn.Embedding(2, 1, sparse=name == "SparseAdam")

    def training_step(self, batch, batch_idx):
        table = self.table(torch.tensor([0])).sum() ** 2
        return super().training_step(batch, batch_idx) + table

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return pools.optimizers_of(self.name, trained, list(self.table.parameters()))

    def on_train_epoch_end(self):
        self.seen.append(weights(self))


@pytest.mark.parametrize("name", pools.optimizers())
def test_an_optimizer_trains_the_new_group_or_is_refused(name):
    net = Optimized(name)
    if name in ("LBFGS", "Muon", "SparseAdam"):
        assert name in refusal(net)
    else:
        assert not refusal(net, epochs=2)
        assert [changed(net, e, "backbone.0.weight") for e in (0, 1)] == [False, True]


@pytest.mark.parametrize("name", ["LBFGS", "Muon", "SparseAdam"])
def test_an_optimizer_that_takes_no_group_of_the_users_rule_is_refused_at_once(name):
    with pytest.raises(UsageError, match=rf"Whole: {name} takes no group .* Fix: another optim"):
        run(Whole(), 2, net=Optimized(name))


def test_a_run_that_ends_before_is_not_refused():
    assert not refusal(Net("OneCycleLR"), BackboneFinetuning(4))


class Whole(Own):
    """Adds each parameter of the backbone in epoch 1."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR", "SWALR"])
def test_a_scheduler_that_takes_no_group_of_the_users_rule_is_warned_of(name):
    text = f"Whole: {name} takes no group .* Fix: another sched"
    with (
        pytest.warns(UserWarning, match=f"{text}.* must add no group"),
        pytest.raises(UsageError, match=text),
    ):
        run(Whole(), 2, net=Net(name))


@pytest.mark.filterwarnings("error:Never")
def test_a_rule_that_adds_no_group_trains_with_each_scheduler():
    class Never(Own):
        def freeze_before_training(self, pl_module):
            pl_module.backbone[0].bias.requires_grad_(False)

        def finetune_function(self, pl_module, epoch, optimizer):
            pass

    net = Net("StepLR")
    run(Never(), 2, net=net)
    assert not changed(net, 1, "backbone.0.bias")
    with pytest.warns(UserWarning, match="Never: OneCycleLR takes no group"):
        run(Never(), 2, net=Net("OneCycleLR"))


def test_a_rate_of_nothing_is_a_warning():
    class WarmUp(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.head.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch)]

    with pytest.warns(UserWarning, match=r"the rate 0, .* Fix: a later epoch"):
        run(BackboneFinetuning(0), net=WarmUp())


def test_averaged_epochs_set_the_rate_of_the_new_group():
    swa = StochasticWeightAveraging(0.5, 2, annealing_epochs=2, annealing_strategy="linear")
    rates = run(BackboneFinetuning(2), plugins=[swa]).rates
    assert rates[1:] == [[0.01], pytest.approx([0.255, (0.0255 + 0.5) / 2]), [0.5, 0.5]]


@pytest.mark.parametrize("callback", [BackboneFinetuning(2), Whole()])
def test_a_list_of_averaged_rates_is_refused_beside_new_groups(callback):
    net = Net()
    with pytest.raises(
        UsageError, match=rf"{type(callback).__name__} adds groups .* Fix: one rate"
    ):
        run(callback, plugins=[StochasticWeightAveraging([0.5], 2)], net=net)
    assert not net.seen
