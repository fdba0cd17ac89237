"""swa: the average of the last epochs' weights, its rates, and BatchNorm's statistics."""

import math

import pytest
import torch
from small_models import SGD, EvalNet, Net, assert_equal, fit, loader, trainer, weights
from torch import nn

from geartrain import UsageError, hookimpl
from geartrain.callbacks import ModelCheckpoint, StochasticWeightAveraging
from geartrain.testing import ThreadRanks


class Notes:
    """Records the weights and the rate of each epoch."""

    def __init__(self):
        self.weights, self.rates, self.steps = [], [], []

    @hookimpl
    def on_step_end(self, run):
        self.steps.append(run.optimizers[0].param_groups[0]["lr"])

    @hookimpl
    def on_epoch_end(self, run):
        self.weights.append(weights(run.module))
        self.rates.append(run.optimizers[0].param_groups[0]["lr"])


def saver(folder, **options):
    return ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, **options)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


class Norm(EvalNet):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize(("start", "first"), [(3, 2), (0.6, 2), (1, 0), (0.0, 0), (1.0, 4)])
@pytest.mark.parametrize("strategy", ["single", ThreadRanks(2)])
def test_the_module_holds_the_mean_of_the_last_epochs(start, first, strategy):
    net, notes = Net(), Notes()
    swa = StochasticWeightAveraging(0.05, start)
    fit(net, plugins=[notes, swa], max_epochs=5, strategy=strategy, seed=1)
    epochs = notes.weights
    for name, value in net.state_dict().items():
        mean = torch.stack([one[name] for one in epochs[first:]]).mean(0)
        torch.testing.assert_close(value, mean)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_rates_go_to_their_value_and_stay(strategy):
    notes = Notes()
    swa = StochasticWeightAveraging(0.5, 3, annealing_epochs=4, annealing_strategy=strategy)
    fit(Scheduled(), plugins=[notes, swa], max_epochs=8)
    shares = [0, 0.25, 0.5, 0.75, 1, 1]
    if strategy == "cos":
        shares = [(1 - math.cos(math.pi * share)) / 2 for share in shares]
    expected = [0.1, 0.05, *(0.025 + (0.5 - 0.025) * share for share in shares)]
    assert notes.steps[::6] == pytest.approx(expected)
    assert notes.steps[5::6] == pytest.approx(expected)


def test_batch_norm_has_the_statistics_of_the_average():
    net = Norm()
    fit(net, plugins=[StochasticWeightAveraging(0.05, 1)], max_epochs=3)
    norm = net.layers[1]
    inputs = [net.layers[0](x) for x, _ in loader()]
    mean = torch.stack([x.mean(0) for x in inputs]).mean(0)
    torch.testing.assert_close(norm.running_mean, mean.detach())
    assert norm.momentum == 0.1
    assert norm.num_batches_tracked == 6


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_with_the_same_module(ranks):
    net = Norm()
    strategy = "single" if ranks == 1 else ThreadRanks(ranks)
    fit(net, plugins=[StochasticWeightAveraging(0.05, 1)], max_epochs=2, strategy=strategy)
    assert net.layers[1].num_batches_tracked == 6 // ranks
    assert net.layers[1].running_var.isfinite().all()


def test_a_run_that_resumes_ends_with_the_same_average(tmp_path):
    def run(folder, **options):
        torch.manual_seed(0)
        net = Scheduled()
        plugins = [
            StochasticWeightAveraging(0.3, 2, annealing_epochs=2),
            ModelCheckpoint(
                dirpath=folder, filename="{step}", every_n_train_steps=4, save_top_k=-1
            ),
        ]
        trainer(max_epochs=4, plugins=plugins, seed=1).fit(net, loader(shuffle=True), **options)
        return net

    whole = run(tmp_path / "whole")
    for step in (4, 8, 12, 20):
        path = tmp_path / "whole" / f"step={step}.ckpt"
        assert_equal(run(tmp_path / str(step), ckpt_path=path), whole)


def test_a_checkpoint_has_the_average_beside_the_trained_weights(tmp_path):
    net, notes = Net(), Notes()
    plugins = [
        StochasticWeightAveraging(0.05, 1),
        notes,
        saver(tmp_path),
    ]
    fit(net, plugins=plugins, max_epochs=2)
    state = torch.load(tmp_path / "step=12.ckpt", weights_only=True)
    assert_equal(state["model"], notes.weights[1])
    assert_equal(state["average"], net)


@pytest.mark.parametrize(
    "wrong",
    [
        {"swa_lrs": 0.0},
        {"swa_lrs": []},
        {"swa_lrs": "1"},
        {"swa_epoch_start": 0},
        {"swa_epoch_start": 1.5},
        {"annealing_epochs": -1},
        {"annealing_strategy": "none"},
    ],
)
def test_wrong_options(wrong):
    with pytest.raises(UsageError, match=f"swa: {next(iter(wrong))}="):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, **wrong})


def test_runs_that_cannot_be_averaged():
    swa = StochasticWeightAveraging(0.1)
    with pytest.raises(UsageError, match="fraction of max_epochs, which has no end"):
        fit(plugins=[swa], max_epochs=-1, max_steps=3)

    class Two(Net):
        def configure_optimizers(self):
            return [SGD(self.layers[0].parameters()), SGD(self.layers[2].parameters())]

        automatic_optimization = False

    with pytest.raises(UsageError, match="the module optimizes manually"):
        fit(Two(), plugins=[swa])
    with pytest.raises(UsageError, match="swa_lrs has 2 rates, and the optimizer 1 groups"):
        fit(plugins=[StochasticWeightAveraging([0.1, 0.2])])
    with pytest.warns(UserWarning, match="averaged nothing: epoch 9 was not run"):
        fit(plugins=[StochasticWeightAveraging(0.1, 9)])
