"""Callbacks on two ranks: where ranks see different things, they still do the same."""

import pytest

from .ranks import results


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
