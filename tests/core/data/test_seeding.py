"""Seeds and determinism: their settings, and that torch's global state is restored."""

import os
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from small_models import Net, assert_equal, differ, fit, loader, trainer, weights

import geartrain as gt


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item(), torch.randn(1).item()


def test_seed_everything():
    assert gt.seed_everything(3) == 3
    first = draw()
    gt.seed_everything(3)
    assert draw() == first
    gt.seed_everything(4)
    other = draw()
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_module_made_after_the_trainer_has_the_seeds_weights():
    def made(seed):
        trainer(seed=seed)
        return weights(Net())

    assert_equal(made(1), made(1))
    assert differ(made(1), made(2))


def test_the_run_starts_from_the_seed_whatever_was_drawn_before():
    """The same order of samples, the same dropout."""

    class Drops(Net):
        def forward(self, x):
            return torch.nn.functional.dropout(super().forward(x))

    def trained(drawn):
        one, net = trainer(seed=5, max_epochs=2), Drops()
        torch.rand(drawn)
        one.fit(net, loader(shuffle=True))
        return net

    assert_equal(trained(0), trained(7))


def test_without_a_seed_the_generators_are_not_changed():
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    trainer()
    assert torch.equal(torch.rand(3), expected)


def state():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


def forget(monkeypatch):
    """Remove cuBLAS's variable, and again after the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture(params=[(False, False, True), (True, True, False)])
def before(request, monkeypatch):
    """The user's own settings."""
    forget(monkeypatch)
    enabled, warn_only, benchmark = request.param
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark
    yield request.param
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


class Asks(Net):
    def training_step(self, batch, batch_idx):
        self.state = state()
        if getattr(self, "fails", False):
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("mode", "inside", "fails"),
    [
        (True, (True, False, False), False),
        ("warn", (True, True, False), False),
        (True, (True, False, False), True),
    ],
)
def test_deterministic_is_set_in_the_run_and_taken_back(before, mode, inside, fails):
    net = Asks()
    net.fails = fails
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        fit(net, deterministic=mode)
    assert net.state == inside
    assert state() == before


def test_without_deterministic_the_state_stays_as_it_was(before):
    net = Asks()
    fit(net)
    assert net.state == before == state()


def test_cublas_variable_is_set_unless_the_user_set_it(monkeypatch):
    forget(monkeypatch)
    fit(deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    fit(deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_an_operation_without_a_deterministic_form_is_an_error(monkeypatch):
    forget(monkeypatch)

    class Put(Net):
        def training_step(self, batch, batch_idx):
            torch.zeros(3).put_(
                torch.tensor([0, 0]), torch.ones(2)
            )  # which of the two wins is not determined
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="deterministic"):
        fit(Put(), deterministic=True)
    with pytest.warns(UserWarning, match="deterministic"):
        fit(Put(), deterministic="warn")
