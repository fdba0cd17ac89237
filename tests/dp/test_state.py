"""State that steps change on replicas: it is kept, or a warning names it."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt

from .cases import Net, dp, one_trainer, samples


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.counter += 1
        self.seen += len(x)
        return x


class Changing(Net):
    def __init__(self):
        super().__init__()
        self.net = Part()
        self.constant, self.kept = 1.5, []
        self.register_buffer("mean", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        self.constant = float("1.5")  # set to an equal value
        self.kept.append(len(batch[0]))
        self.mean = self.mean + batch[0].mean(dim=0)
        self.newest = batch_idx
        return super().training_step([self.net(batch[0]), batch[1]], batch_idx)


def warned(trainer, command, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(trainer, command)(*arguments)
    assert all(issubclass(w.category, UserWarning) for w in caught)
    return [str(w.message) for w in caught if str(w.message).startswith("geartrain-dp[dp]")]


def test_lost_state_causes_one_warning_with_its_path():
    module = Changing()
    lost, changed = warned(dp(max_epochs=2), "fit", module, DataLoader(samples(), batch_size=8))
    assert "mean, net.counter, newest was set on a replica in training_step and is lost" in lost
    assert "changed the buffers net.seen on every replica" in changed
    assert "The first replica's are kept" in changed
    assert module.net.counter == 0
    assert module.net.seen == SAMPLES_OF_FIRST_PARTS
    assert module.kept == [4] * 24  # all replicas share the module's list
    assert not hasattr(module, "newest")
    assert not module.mean.any()


SAMPLES_OF_FIRST_PARTS = 2 * 48 // 2


def test_a_module_that_changes_nothing_causes_no_warning():
    trainer, data = dp(), DataLoader(samples(), batch_size=7)
    assert warned(trainer, "fit", Net(), data, data) == []
    assert warned(trainer, "test", Net(), data) == []
    assert warned(trainer, "predict", Net(), data) == []


def test_one_device_loses_nothing():
    module = Changing()
    assert warned(dp(1), "fit", module, DataLoader(samples(), batch_size=8)) == []
    assert (module.net.counter, module.net.seen, module.newest) == (6, 48, 5)


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.inputs = nn.BatchNorm1d(3)

    def forward(self, x, extra=True):
        return super().forward(self.inputs(x), extra)


def test_batch_norm_keeps_the_first_parts_statistics_and_warns():
    module, data = Normed(), samples()
    (message,) = warned(dp(), "fit", module, DataLoader(data, batch_size=8))
    assert "inputs.num_batches_tracked, inputs.running_mean, inputs.running_var" in message
    expected = nn.BatchNorm1d(3)
    for batch in data.tensors[0].split(8):
        expected(batch[:4])
    assert module.inputs.num_batches_tracked == 6
    torch.testing.assert_close(module.inputs.running_mean, expected.running_mean)
    torch.testing.assert_close(module.inputs.running_var, expected.running_var)


def test_batch_norm_evaluates_as_on_one_device():
    module, data = Normed(), DataLoader(samples(), batch_size=7)
    warned(dp(), "fit", module, data)
    trainer = one_trainer(strategy="single")
    trainer.validate(module, data)
    other = dp(3)
    assert warned(other, "validate", module, data) == []
    assert other.run.metrics == pytest.approx(trainer.run.metrics, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda net: setattr(net, "first", nn.LazyLinear(8)),
            "first has lazy parameters.*Fix: call the module on one batch",
        ),
        (
            lambda net: setattr(net, "extra", torch.compile(net.extra, backend="eager")),
            "extra is compiled, .*Fix: use the plain module",
        ),
        (lambda net: net.extra.compile(backend="eager"), "extra is compiled"),
        (
            lambda net: setattr(net, "extra", torch.jit.trace(net.extra, torch.ones(1, 8))),
            "extra is a ScriptModule",
        ),
    ],
    ids=["lazy", "torch.compile", "compile", "scripted"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_cannot_be_replicated_are_refused(change, message):
    module = Net()
    change(module)
    with pytest.raises(gt.TrainingError, match=rf"geartrain-dp\[dp\]: {message}"):
        dp().fit(module, DataLoader(samples(), batch_size=8))


def test_the_module_is_whole_inside_a_step():
    class Asking(Net):
        def validation_step(self, batch, batch_idx):
            assert self.trainer.world_size == 1
            assert self.device == torch.device("cpu")
            assert self.global_rank == 0
            assert len(list(self.parameters())) == 8
            assert self.all_gather(batch[0]).shape == (1, *batch[0].shape)
            assert not self.training
            asked.append(True)

    asked = []
    dp().validate(Asking(), DataLoader(samples(8), batch_size=4))
    assert len(asked) == 4
