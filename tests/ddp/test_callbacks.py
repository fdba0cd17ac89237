"""Callbacks on two ranks: ranks act alike even if they see different values."""

import pytest
import torch
from several_ranks import failed, kept_by
from torch.utils.data import DataLoader

from geartrain import hookimpl
from geartrain.callbacks import EMA, Callback, EarlyStopping, NaNGuard, Norms, Throughput, Timer

from .cases import Net, ddp, samples, weights


def fit(module, *plugins, epochs=2, **options):
    trainer = ddp(max_epochs=epochs, plugins=plugins, **options)
    trainer.fit(module, DataLoader(samples(16), batch_size=2), DataLoader(samples(4), batch_size=2))
    return trainer


# --- callbacks that end training -----------------------------------------------------------------


class Own(Net):
    """Logs a metric that improves on one rank only, without sync_dist."""

    def __init__(self, better_on):
        super().__init__()
        self.better_on = better_on

    def validation_step(self, batch, batch_idx):
        epoch = self.current_epoch
        self.log("metric", float(-epoch if self.global_rank == self.better_on else epoch))


class Only(Net):
    def validation_step(self, batch, batch_idx):
        if self.global_rank == 0:
            self.log("first only", 1.0, rank_zero_only=True)


class LateOn(Timer):
    """A timer that expires on one rank only."""

    def __init__(self, rank, interval):
        super().__init__(1000, interval)
        self.rank = rank

    @hookimpl
    def on_run_start(self, run):
        super().on_run_start(run)
        if run.world.rank == self.rank:
            self._started -= 2000


def stop(module, plugin, **options):
    trainer = fit(module, plugin, epochs=6, **options)
    return trainer.current_epoch, trainer.global_step


def end_trainings():
    found = {}
    for rank in (0, 1):
        found[f"better on {rank}"] = stop(Own(rank), EarlyStopping("metric", patience=2))
        found[f"better on {rank}, within"] = stop(
            Own(rank), EarlyStopping("metric", patience=2), val_check_interval=2
        )
        found[f"late on {rank}"] = stop(Net(), LateOn(rank, "step"), log_every_n_steps=3)
        found[f"late on {rank}, epochs"] = stop(Net(), LateOn(rank, "epoch"))
    found["first only"] = stop(Only(), EarlyStopping("first only", patience=1))
    return found


stopped = kept_by(end_trainings)


def test_early_stopping_uses_rank_0s_value(stopped):
    for rank in stopped:
        assert rank["better on 0"] == (6, 24)
        assert rank["better on 1"] == (3, 12)
        assert rank["better on 0, within"] == (6, 24)
        # Checked after steps 2 and 4 of each epoch: 0, 0, 1. The third check, in epoch 2, ends it.
        assert rank["better on 1, within"] == (2, 6)


def test_early_stopping_on_a_metric_that_only_rank_0_logs(stopped):
    assert [rank["first only"] for rank in stopped] == [(2, 8)] * 2


def test_the_first_rank_whose_time_is_up_ends_training_at_the_flush(stopped):
    for rank in stopped:
        assert rank["late on 0"] == rank["late on 1"] == (1, 3)


def test_rank_0s_clock_decides_between_epochs(stopped):
    for rank in stopped:
        assert rank["late on 0, epochs"] == (1, 4)
        assert rank["late on 1, epochs"] == (6, 24)


# --- NaN, averages and monitoring ----------------------------------------------------------------


class Bad(Net):
    def __init__(self, when=3, **options):
        super().__init__(**options)
        self.when, self.n = when, 0

    def training_step(self, batch, batch_idx):
        self.n += 1
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.n == self.when and self.global_rank == 1 else loss


class Watches:
    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def forward(self, run, method):
        if method == "validation_step":
            self.seen.append(weights(run.module))
        return (yield)


class Ranks(Callback):
    def __init__(self):
        self.seen = []

    def setup(self, trainer, pl_module, stage):
        self.seen.append((trainer.global_rank, trainer.world_size))


def guard_and_average():
    """Rank 1's loss is NaN in the third step; weights are averaged."""
    found = {}
    for check in ("loss", "gradients"):
        module = Bad()
        trainer = fit(module, NaNGuard("skip", check))
        found[f"skip {check}"] = (trainer.global_step, weights(module))
    module = Net(norm=True)
    ema = EMA(0.9)
    fit(module, ema)
    found["ema"] = weights(module)
    watches = Watches()
    fit(Net(norm=True), watches, EMA(0.9))
    found["validated"] = watches.seen
    trainer = ddp(callbacks=[ranks := Ranks()], plugins=[Norms(), Throughput()])
    trainer.fit(Net(), DataLoader(samples(16), batch_size=2))
    found["callback"], found["metrics"] = ranks.seen, dict(trainer.run.metrics)
    return found


guarded = kept_by(guard_and_average)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def raise_on_nan():
    ddp(plugins=[NaNGuard("raise")]).fit(Bad(), DataLoader(samples(16), batch_size=2))


def test_nan_on_one_rank_fails_both_with_one_error(tmp_path):
    first, second = failed(tmp_path, raise_on_nan)
    assert first.error == second.error
    assert "the loss was not finite in step 3, on rank 1" in first.error


@pytest.mark.parametrize("check", ["loss", "gradients"])
def test_nan_on_one_rank_is_skipped_on_both(guarded, check):
    (steps, first), (_, second) = (rank[f"skip {check}"] for rank in guarded)
    assert steps == 8
    assert equal(first, second)
    assert all(torch.isfinite(tensor).all() for tensor in first.values())


def test_the_average_is_equal_on_all_ranks_buffers_included(guarded):
    first, second = (rank["ema"] for rank in guarded)
    assert "norm.running_mean" in first
    assert equal(first, second)


def test_validated_weights_are_equal_on_all_ranks(guarded):
    first, second = (rank["validated"] for rank in guarded)
    assert len(first) == len(second) > 0
    assert all(map(equal, first, second))


def test_callbacks_know_their_rank_in_setup(guarded):
    assert [rank["callback"] for rank in guarded] == [[(0, 2)], [(1, 2)]]


def test_figures_of_reduced_gradients_and_of_all_ranks(guarded):
    norms = [rank["metrics"]["grad_norm"] for rank in guarded]
    assert norms[0] == norms[1] > 0
    for rank in guarded:
        assert (
            rank["metrics"]["global/samples_per_sec"]
            == 2 * rank["metrics"]["device/samples_per_sec"]
        )
        assert rank["metrics"]["device/flops_per_sec"] > 0
