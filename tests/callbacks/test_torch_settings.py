"""``deterministic`` and ``detect_anomaly``: torch's settings in a run, restored after it."""

import os
from contextlib import nullcontext

import pytest
import torch
from small_models import Net, fit


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


class NaN(Net):
    def training_step(self, batch, batch_idx):
        return torch.sqrt(self.loss(batch) * 0 - 1)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_detect_anomaly_stops_in_the_backward_that_makes_a_nan():
    fit(NaN())
    with (
        pytest.warns(UserWarning, match="Anomaly Detection has been enabled"),
        pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan"),
    ):
        fit(NaN(), detect_anomaly=True)
    assert not torch.is_anomaly_enabled()


def test_without_detect_anomaly_the_users_setting_stays():
    class Looks(Net):
        def training_step(self, batch, batch_idx):
            assert torch.is_anomaly_enabled()
            return super().training_step(batch, batch_idx)

    with torch.autograd.set_detect_anomaly(True):
        fit(Looks())
        assert torch.is_anomaly_enabled()
