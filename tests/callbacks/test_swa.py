"""swa: the average of the last epochs' weights, its rates, and BatchNorm's statistics."""

import math

import pytest
import torch
from small_models import EvalNet, Net, assert_equal, fit, loader, trainer, weights
from torch import nn

from geartrain import hookimpl
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


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


class Norm(EvalNet):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("start", "first", "strategy"),
    [
        (3, 2, "single"),
        (0.6, 2, ThreadRanks(2)),
        (1, 0, "single"),
        (0.0, 0, "single"),
        (1.0, 4, "single"),
    ],
)
def test_the_module_holds_the_mean_of_the_last_epochs(start, first, strategy):
    net, notes = Net(), Notes()
    swa = StochasticWeightAveraging(0.05, start)
    fit(net, plugins=[notes, swa], max_epochs=5, strategy=strategy, seed=1)
    for name, value in net.state_dict().items():
        mean = torch.stack([epoch[name] for epoch in notes.weights[first:]]).mean(0)
        torch.testing.assert_close(value, mean)


def test_a_start_after_the_last_epoch_is_a_warning():
    with pytest.warns(UserWarning, match="averaged nothing: epoch 9 was not run"):
        fit(plugins=[StochasticWeightAveraging(0.1, 9)])


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
    ranks, net = Norm(), Norm()
    fit(ranks, plugins=[StochasticWeightAveraging(0.05, 1)], strategy=ThreadRanks(2))
    assert ranks.layers[1].num_batches_tracked == 3
    assert ranks.layers[1].running_var.isfinite().all()
    fit(net, plugins=[StochasticWeightAveraging(0.05, 1)], max_epochs=2)
    norm = net.layers[1]
    inputs = [net.layers[0](x) for x, _ in loader()]
    mean = torch.stack([x.mean(0) for x in inputs]).mean(0)
    torch.testing.assert_close(norm.running_mean, mean.detach())
    assert norm.momentum == 0.1
    assert norm.num_batches_tracked == 6


def test_a_run_that_resumes_ends_with_the_same_average(tmp_path):
    def run(folder, **options):
        torch.manual_seed(0)
        net = Scheduled()
        every = {"filename": "{step}", "every_n_train_steps": 4, "save_top_k": -1}
        swa = StochasticWeightAveraging(0.3, 2, annealing_epochs=2)
        plugins = [swa, ModelCheckpoint(dirpath=folder, **every)]
        trainer(max_epochs=4, plugins=plugins, seed=1).fit(net, loader(shuffle=True), **options)
        return net

    whole = run(tmp_path / "whole")
    for step in (4, 8, 20):  # before the average, and at two moments with it
        path = tmp_path / "whole" / f"step={step}.ckpt"
        assert_equal(run(tmp_path / str(step), ckpt_path=path), whole)


def test_a_checkpoint_has_the_average_beside_the_trained_weights(tmp_path):
    net, notes, saver = Net(), Notes(), ModelCheckpoint(dirpath=tmp_path, filename="{step}")
    fit(net, plugins=[StochasticWeightAveraging(0.05, 1), notes, saver], max_epochs=2)
    state = torch.load(tmp_path / "step=12.ckpt", weights_only=True)
    assert_equal(state["model"], notes.weights[1])
    assert_equal(state["average"], net)
