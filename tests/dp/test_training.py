"""dp trains, evaluates and predicts like one device."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt

from .cases import CASES, Net, dp, one_trainer, samples, train, weights


@pytest.mark.parametrize("name", CASES)
def test_dp_trains_like_one_device(name):
    _, curve, expected = train(name, "single")
    trainer, theirs, trained = train(name, "dp")
    assert len(curve) > 1
    assert theirs == pytest.approx(curve, rel=1e-5)
    # LBFGS divides by small differences of gradients, which makes rounding larger.
    rtol, atol = (1e-4, 1e-5) if name == "lbfgs" else (1e-5, 1e-6)
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=rtol, atol=atol)
    assert trainer.world_size == 1


def test_each_device_gets_its_part():
    seen = []

    class Seeing(Net):
        def training_step(self, batch, batch_idx):
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.append(-len(batch[0]))

    dp(4, max_steps=1).fit(
        Seeing(), DataLoader(samples(), batch_size=5), DataLoader(samples(6), batch_size=6)
    )
    assert seen == [2, 2, 1, -2, -2, -2]


def test_predictions_are_those_of_one_device():
    loader = DataLoader(samples(11), batch_size=4)
    mine = one_trainer(strategy="single").predict(Net(), loader)
    theirs = dp(3).predict(Net(), loader)
    assert len(mine) == len(theirs) == 3
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, expected in one.items():
            torch.testing.assert_close(other[key], expected)


class Nested(Net):
    """A batch of nested dicts, with text and with items that belong to no sample."""

    def training_step(self, batch, batch_idx):
        x, more = batch["x"], batch["more"]
        assert batch["scale"].ndim == 0
        assert len(batch["names"]) == len(x) == len(more[0])
        assert batch["names"] == [f"name {number:.3f}" for number in x[:, 0].tolist()]
        return nn.functional.mse_loss(self(x), more[0]) * batch["scale"]


def nested(items):
    x, y = torch.stack([i[0] for i in items]), torch.stack([i[1] for i in items])
    names = [f"name {number:.3f}" for number in x[:, 0].tolist()]
    return {"x": x, "more": (y, "all"), "scale": torch.tensor(0.5), "names": names}


def test_nested_batches():
    trained = []
    for strategy, devices in (("single", 1), ("dp", 2)):
        module = Nested()
        one_trainer(strategy=strategy, devices=devices).fit(
            module, DataLoader(samples(), batch_size=5, collate_fn=nested)
        )
        trained.append(weights(module))
    for key, expected in trained[0].items():
        torch.testing.assert_close(trained[1][key], expected, rtol=1e-5, atol=1e-6)


class Recurrent(Net):
    """Parameters in unusual places: a GRU, tied weights, a parametrisation, a ParameterList."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)
        self.extra.weight = self.second.weight
        nn.utils.parametrizations.weight_norm(self.last)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])

    def forward(self, x, extra=True):
        return self.last(self.extra(self.second(self.gru(x[:, None])[0][:, 0])) * self.scales[0])


def test_modules_that_keep_parameters_in_unusual_places():
    trained = []
    for strategy, devices in (("single", 1), ("dp", 2)):
        module = Recurrent()
        one_trainer(strategy=strategy, devices=devices).fit(
            module, DataLoader(samples(), batch_size=5)
        )
        trained.append(weights(module))
    assert not torch.equal(
        trained[0]["gru.weight_ih_l0"], Recurrent().state_dict()["gru.weight_ih_l0"]
    )
    for key, expected in trained[0].items():
        torch.testing.assert_close(trained[1][key], expected, rtol=1e-5, atol=1e-6)


def test_an_error_in_a_part_is_the_users_and_leaves_the_module_unchanged():
    class Failing(Net):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) == 2:
                raise KeyError("my own error")
            return super().training_step(batch, batch_idx)

    module, trainer = Failing(), dp(2)
    with pytest.raises(KeyError, match="my own error") as caught:
        trainer.fit(module, DataLoader(samples(), batch_size=5))
    assert not hasattr(caught.value, "__notes__")  # no plugin is blamed
    assert "loss" not in trainer.callback_metrics
    dp(2).fit(module, DataLoader(samples(), batch_size=8))


def test_none_from_all_parts_skips_the_batch_and_from_some_is_an_error():
    class Skipping(Net):
        least = 9

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if len(batch[0]) >= self.least else None

    module = Skipping()
    before = weights(module)
    dp(2).fit(module, DataLoader(samples(), batch_size=8))
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    module.least = 3
    with pytest.raises(
        gt.TrainingError,
        match=r"output of training_step is Tensor and NoneType in different parts.*_step_end",
    ):
        dp(2).fit(module, DataLoader(samples(), batch_size=5))


# --- in threads, as on CUDA -----------------------------------------------------------------------


def test_parts_in_threads_log_like_parts_in_turn(monkeypatch):
    """torch's parallel_apply gives each replica a thread; this test does so on the CPU."""

    def in_threads(replicas, inputs, devices, side_by_side):
        assert side_by_side
        together = threading.Barrier(len(replicas))

        def one(replica, arguments):
            together.wait(20)
            return replica(*arguments)

        with ThreadPoolExecutor(len(replicas)) as pool:
            return list(pool.map(one, replicas, inputs))

    _, curve, expected = train("5 samples on 4 devices", "single")
    monkeypatch.setattr("geartrain_dp.replicas._apply", in_threads)
    _, theirs, trained = train("5 samples on 4 devices", "dp")
    assert theirs == pytest.approx(curve, rel=1e-5)
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-5, atol=1e-6)


class Cuda:
    """CUDA without the plugin."""

    priority = 0

    def unavailable(self):
        return None

    def device_count(self):
        return torch.cuda.device_count()

    @gt.hookimpl
    def setup_device(self, run):
        return torch.device("cuda", run.plan.devices[0])


class OnDevice(Net):
    def training_step(self, batch, batch_idx):
        assert batch[0].device == self.device == self(batch[0]).device
        return super().training_step(batch, batch_idx)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_cuda_devices_train_like_one():
    trained = []
    for strategy, devices in (("single", 1), ("dp", 2)):
        module = OnDevice("adam")
        trainer = one_trainer(accelerator=Cuda(), strategy=strategy, devices=devices)
        trainer.fit(
            module, DataLoader(samples(), batch_size=5), DataLoader(samples(23), batch_size=5)
        )
        trained.append(
            (
                {key: value.cpu() for key, value in weights(module).items()},
                dict(trainer.run.metrics),
            )
        )
    (expected, metrics), (theirs, their_metrics) = trained
    assert their_metrics == pytest.approx(metrics, rel=1e-3)
    for key, value in expected.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-3, atol=1e-4)
