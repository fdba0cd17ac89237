"""Callbacks on two ranks: where ranks see different things, they still do the same."""

import pytest
import torch

from .ranks import failure, results


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """What each of two ranks kept of trainings that were ended."""
    body = """
from geartrain.callbacks import EarlyStopping, Timer


class Own(Net):
    '''Logs a metric that gets better on one rank only, without sync_dist.'''

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
    '''A timer whose time is up on one rank alone.'''

    def __init__(self, rank, interval):
        super().__init__(1000, interval)
        self.rank = rank

    @hookimpl
    def on_run_start(self, run):
        super().on_run_start(run)
        if run.world.rank == self.rank:
            self._started -= 2000


def fit(module, plugin, **options):
    trainer = ddp(max_epochs=6, plugins=[plugin], **options)
    trainer.fit(module, DataLoader(samples(16), batch_size=2), DataLoader(samples(4), batch_size=2))
    return trainer.current_epoch, trainer.global_step


found = {}
for rank in (0, 1):
    found[f"better on {rank}"] = fit(Own(rank), EarlyStopping("metric", patience=2))
    found[f"better on {rank}, within"] = fit(Own(rank), EarlyStopping("metric", patience=2), val_check_interval=2)
    found[f"late on {rank}"] = fit(Net(), LateOn(rank, "step"), log_every_n_steps=3)
    found[f"late on {rank}, epochs"] = fit(Net(), LateOn(rank, "epoch"))
found["first only"] = fit(Only(), EarlyStopping("first only", patience=1))
trainer = ddp()
trainer.fit(Net(), DataLoader(samples(4), batch_size=2))
keep(trainer, **found)
"""
    return results(tmp_path_factory.mktemp("stopped"), body, timeout=90)


def test_early_stopping_goes_by_rank_0s_value(stopped):
    for rank in stopped:
        assert rank["better on 0"] == (6, 24)
        assert rank["better on 1"] == (3, 12)
        assert rank["better on 0, within"] == (6, 24)
        # Checked after steps 2 and 4 of each epoch: 0, 0, 1; it is the third check, in epoch 2, that ends it.
        assert rank["better on 1, within"] == (2, 6)


def test_early_stopping_on_a_metric_that_rank_0_alone_logs(stopped):
    assert [rank["first only"] for rank in stopped] == [(2, 8)] * 2


def test_the_first_rank_whose_time_is_up_ends_training_at_the_flush(stopped):
    for rank in stopped:
        assert rank["late on 0"] == rank["late on 1"] == (1, 3)


def test_by_epochs_rank_0s_clock_decides(stopped):
    for rank in stopped:
        assert rank["late on 0, epochs"] == (1, 4)
        assert rank["late on 1, epochs"] == (6, 24)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """What each of two ranks kept of trainings in which rank 1's loss is NaN in the third step, and of averaged weights."""
    body = """
from geartrain.callbacks import EMA, Callback, NaNGuard, Norms, Throughput


class Bad(Net):
    def __init__(self, when=3, **options):
        super().__init__(**options)
        self.when, self.n = when, 0

    def training_step(self, batch, batch_idx):
        self.n += 1
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.n == self.when and self.global_rank == 1 else loss


def fit(module, *plugins, **options):
    trainer = ddp(max_epochs=2, plugins=plugins, **options)
    trainer.fit(module, DataLoader(samples(16), batch_size=2), DataLoader(samples(4), batch_size=2))
    return trainer


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


found = {}
for check in ("loss", "gradients"):
    guard = NaNGuard("stop", check)
    trainer = fit(Bad(), guard, log_every_n_steps=4)
    found[f"stop {check}"] = (guard.reason, trainer.global_step)
    module = Bad()
    trainer = fit(module, NaNGuard("skip", check))
    found[f"skip {check}"] = (trainer.global_step, state(module))
module = Net(norm=True)
ema = EMA(0.9)
fit(module, ema)
found["ema"] = state(module)


class Watches:
    seen = []

    @hookimpl(wrapper=True)
    def forward(self, run, method):
        if method == "validation_step":
            self.seen.append(state(run.module))
        return (yield)


fit(Net(norm=True), Watches(), EMA(0.9))
found["validated"] = Watches.seen


class Ranks(Callback):
    seen = []

    def setup(self, trainer, pl_module, stage):
        self.seen.append((trainer.global_rank, trainer.world_size))


trainer = ddp(callbacks=[Ranks()], plugins=[Norms(), Throughput()])
trainer.fit(Net(), DataLoader(samples(16), batch_size=2))
found["callback"], found["metrics"] = Ranks.seen, dict(trainer.callback_metrics)
keep(trainer, **found)
"""
    return results(tmp_path_factory.mktemp("guarded"), body, timeout=110)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_nan_on_one_rank_stops_both_and_names_it(guarded):
    for rank in guarded:
        assert rank["stop loss"] == ("the loss was not finite in step 3, on rank 1.", 4)
        # Reduced over ranks, it is in both ranks' gradients.
        assert rank["stop gradients"] == ("the gradient of first.weight was not finite in step 3, on rank 0.", 4)


def test_nan_on_one_rank_fails_both_with_one_error(tmp_path):
    body = """
from geartrain.callbacks import NaNGuard


class Bad(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 and self.global_rank == 1 else loss


class Tells:
    @hookimpl
    def on_exception(self, run, error):
        with open(f"error-{run.world.rank}.txt", "w") as file:
            file.write(str(error))


ddp(plugins=[Tells(), NaNGuard("raise")]).fit(Bad(), DataLoader(samples(16), batch_size=2))
"""
    assert "the loss was not finite in step 3, on rank 1" in failure(tmp_path, body)
    told = [(tmp_path / f"error-{rank}.txt").read_text(encoding="utf-8") for rank in (0, 1)]
    assert told[0] == told[1]
    assert "the loss was not finite in step 3, on rank 1" in told[0]


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


def test_what_is_validated_is_equal_on_all_ranks(guarded):
    first, second = (rank["validated"] for rank in guarded)
    assert len(first) == len(second) > 0
    assert all(map(equal, first, second))


def test_callbacks_know_their_rank_in_setup(guarded):
    assert [rank["callback"] for rank in guarded] == [[(0, 2)], [(1, 2)]]


def test_figures_of_reduced_gradients_and_of_all_ranks(guarded):
    norms = [rank["metrics"]["grad_norm"] for rank in guarded]
    assert norms[0] == norms[1] > 0
    for rank in guarded:
        assert rank["metrics"]["global/samples_per_sec"] == 2 * rank["metrics"]["device/samples_per_sec"]
        assert rank["metrics"]["device/flops_per_sec"] > 0
