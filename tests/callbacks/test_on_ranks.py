"""Callbacks on two ranks: they act together even if ranks have different data."""

import pytest
import torch
from regression import Net, samples, weights
from threads import equal, on_threads
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    NaNGuard,
    Norms,
    Throughput,
    Timer,
)


def fit(module, *plugins, **options):
    """Train 4 steps an epoch; return the strategy."""
    trainer, strategy = on_threads(plugins=plugins, **{"max_epochs": 6, **options})
    trainer.fit(module, DataLoader(samples(16), batch_size=2), DataLoader(samples(4), batch_size=2))
    return strategy


def counters(strategy):
    """Return epochs and steps, which must be the same on all ranks."""
    (found,) = {(run.epoch, run.step) for run in strategy.runs}
    return found


# --- end of training ------------------------------------------------------------------------------


class Own(Net):
    """A net whose metric improves on one rank only, without sync_dist."""

    def __init__(self, better_on):
        super().__init__()
        self.better_on = better_on

    def validation_step(self, batch, batch_idx):
        epoch = self.current_epoch
        self.log("metric", float(-epoch if self.global_rank == self.better_on else epoch))


@pytest.mark.filterwarnings("ignore:validate. .* is of rank 0's part")
@pytest.mark.parametrize(
    ("better_on", "options", "expected"),
    [
        (0, {}, (6, 24)),
        (1, {}, (3, 12)),
        (0, {"val_check_interval": 2}, (6, 24)),
        # The checks are after steps 2 and 4 of each epoch. The third, in epoch 2, ends training.
        (1, {"val_check_interval": 2}, (2, 6)),
    ],
)
def test_early_stopping_goes_by_rank_0s_value(better_on, options, expected):
    assert counters(fit(Own(better_on), EarlyStopping("metric", patience=2), **options)) == expected


def test_early_stopping_on_a_metric_that_rank_0_alone_logs():
    class Only(Net):
        def validation_step(self, batch, batch_idx):
            if self.global_rank == 0:
                self.log("first only", 1.0, rank_zero_only=True)

    assert counters(fit(Only(), EarlyStopping("first only", patience=1))) == (2, 8)


class LateOn(Timer):
    """A timer whose time is up on one rank only."""

    def __init__(self, rank, interval):
        super().__init__(1000, interval)
        self.rank = rank

    @hookimpl
    def on_run_start(self, run):
        super().on_run_start(run)
        if run.world.rank == self.rank:
            self._started -= 2000


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_whose_time_is_up_ends_training_at_the_flush(rank):
    assert counters(fit(Net(), LateOn(rank, "step"), log_every_n_steps=3)) == (1, 3)


@pytest.mark.parametrize(("rank", "expected"), [(0, (1, 4)), (1, (6, 24))])
def test_by_epochs_rank_0s_clock_decides(rank, expected):
    assert counters(fit(Net(), LateOn(rank, "epoch"))) == expected


# --- NaN ------------------------------------------------------------------------------------------


class Bad(Net):
    """A net with a NaN loss on rank 1 in the third step."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def training_step(self, batch, batch_idx):
        self.n += 1
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.n == 3 and self.global_rank == 1 else loss


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("loss", "the loss was not finite in step 3, on rank 1."),
        # After the reduction over ranks, both ranks' gradients have it.
        ("gradients", "the gradient of first.weight was not finite in step 3, on rank 0."),
    ],
)
def test_nan_on_one_rank_fails_both_with_one_error(check, reason, tmp_path):
    messages = {}

    class Tells:
        @hookimpl
        def on_exception(self, run, error):
            messages[run.world.rank] = str(error)

    saves = ModelCheckpoint(save_last=True, every_n_train_steps=1)
    with pytest.raises(gt.TrainingError, match=reason):
        fit(Bad(), Tells(), NaNGuard("raise", check), saves, output=tmp_path / "run")
    assert messages[0] == messages[1]
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["step"] == 2
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())


@pytest.mark.parametrize("check", ["loss", "gradients"])
def test_nan_on_one_rank_is_skipped_on_both(check):
    strategy = fit(Bad(), NaNGuard("skip", check), max_epochs=2)
    assert counters(strategy)[1] == 8
    first, second = (run.module.state_dict() for run in strategy.runs)
    assert equal(first, second)
    assert all(torch.isfinite(tensor).all() for tensor in first.values())


# --- averages, measurements, callbacks ------------------------------------------------------------


def test_the_average_is_equal_on_all_ranks_buffers_included():
    seen = [], []

    class Watches:
        @hookimpl(wrapper=True)
        def forward(self, run, method):
            if method == "validation_step":
                seen[run.world.rank].append(weights(run.module))
            return (yield)

    strategy = fit(Net(norm=True), Watches(), EMA(0.9), max_epochs=1)
    first, second = (run.module.state_dict() for run in strategy.runs)
    assert "norm.running_mean" in first
    assert equal(first, second)
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(map(equal, *seen)), "the validated weights"


def test_callbacks_know_their_rank_in_setup():
    seen = []

    class Ranks(Callback):
        def setup(self, trainer, pl_module, stage):
            seen.append((trainer.global_rank, trainer.world_size))

    trainer, _ = on_threads(callbacks=[Ranks()])
    trainer.fit(Net(), DataLoader(samples(16), batch_size=2))
    assert seen == [(0, 2), (1, 2)]


def test_figures_of_reduced_gradients_and_of_all_ranks():
    first, second = (run.metrics for run in fit(Net(), Norms(), Throughput(), max_epochs=1).runs)
    assert first["grad_norm"] == second["grad_norm"] > 0
    for metrics in (first, second):
        assert metrics["global/samples_per_sec"] == 2 * metrics["device/samples_per_sec"]
        assert metrics["device/flops_per_sec"] > 0
