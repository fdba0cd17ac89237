"""self.log, should_stop and the collectives on two ranks."""

import pytest
import torch
from several_ranks import failed, kept_by
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl

from .cases import Net, ddp, samples


class Counts:
    def __init__(self):
        self.calls = []

    @hookimpl(wrapper=True)
    def log_sync(self, run, values):
        self.calls.append(len(values))
        return (yield)


class Logs(Net):
    def __init__(self, metrics=1):
        super().__init__()
        self.metrics, self.found = metrics, {}

    def training_step(self, batch, batch_idx):
        for i in range(self.metrics):
            self.log(f"metric_{i}", float(i), sync_dist=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        rank = self.global_rank
        self.log("one", 1.0, sync_dist=True)
        self.log("mean", float(rank), sync_dist=True)
        for how in ("sum", "min", "max"):
            self.log(how, 10.0 + rank, reduce_fx=how, sync_dist=True)
        self.log("own", float(rank))
        if rank == 0:
            self.log("first only", 3.0, rank_zero_only=True)
        self.log("asked everywhere", 4.0 + rank, rank_zero_only=True)

    def test_step(self, batch, batch_idx):
        rank = self.global_rank
        run = self.trainer.run
        ragged = torch.arange(float(rank + 1)).requires_grad_()
        self.found["gathered"] = self.all_gather(
            {"equal": torch.tensor([rank, 7]), "nested": [(ragged, torch.tensor(rank)), "text"]}
        )
        self.found["half"] = self.all_gather(torch.full((2, 2), rank, dtype=torch.bfloat16)[:, :1])
        self.found["flags"] = self.all_gather(torch.tensor([rank == 1]))
        self.found["none on one"] = self.all_gather(torch.zeros(rank, 3))
        self.found["broadcast"] = [
            run.hooks.broadcast(run=run, obj={"from": rank}, src=src) for src in (0, 1)
        ]
        self.found["barrier"] = run.hooks.barrier(run=run)
        try:
            self.all_gather(torch.zeros(2, 2 + rank))
        except gt.TrainingError as error:
            self.found["other shapes"] = str(error)
        try:
            self.all_gather(torch.zeros(2, dtype=torch.float64 if rank else torch.float32))
        except gt.TrainingError as error:
            self.found["other types"] = str(error)


class EndOnly(Net):
    def validation_step(self, batch, batch_idx):
        self.log("in_step", 5.0, sync_dist=True)

    def on_validation_epoch_end(self):
        self.log("at_the_end", float(self.global_rank), sync_dist=True)


class Stops(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.current_epoch == 1:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def logged():
    found, counts, logs = {}, Counts(), Logs()
    trainer = ddp(plugins=[counts])
    for metrics in (1, 300):
        before = len(counts.calls)
        trainer.fit(Logs(metrics), DataLoader(samples(16), batch_size=4))
        found[f"collectives of {metrics}"] = len(counts.calls) - before
    three = DataLoader(samples(3), batch_size=2)  # two samples on rank 0, one on rank 1
    found["validated"] = trainer.validate(logs, three)[0]
    trainer.test(logs, DataLoader(samples(2)))
    found["one sample"] = trainer.validate(EndOnly(), DataLoader(samples(1)))[0]
    stopping = ddp(max_epochs=50)
    stopping.fit(Stops(), DataLoader(samples(16), batch_size=4))
    found["stopped"] = (stopping.current_epoch, stopping.global_step)
    return {**found, **logs.found}


kept = kept_by(logged)


def test_mean_is_weighted_by_batch_size_over_ranks(kept):
    for rank in kept:
        assert rank["validated"]["one"] == 1.0
        assert rank["validated"]["mean"] == pytest.approx(1 / 3)


def test_sums_and_extremes_are_over_ranks(kept):
    for rank in kept:
        assert [rank["validated"][how] for how in ("sum", "min", "max")] == [21.0, 10.0, 11.0]


def test_without_sync_dist_each_rank_has_its_own_and_rank_zero_only_is_no_error(kept):
    assert [rank["validated"]["own"] for rank in kept] == [0.0, 1.0]
    assert kept[0]["validated"]["first only"] == 3.0
    assert kept[0]["validated"]["asked everywhere"] == 4.0
    assert "first only" not in kept[1]["validated"]


def test_a_rank_without_samples_may_log_at_the_epochs_end(kept):
    for rank in kept:
        assert rank["one sample"] == {"in_step": 5.0, "at_the_end": 0.5}


def test_many_metrics_take_as_many_collectives_as_one(kept):
    for rank in kept:
        assert rank["collectives of 300"] == rank["collectives of 1"]
        assert rank["collectives of 1"] <= 12


def test_should_stop_on_one_rank_stops_all_in_the_same_step(kept):
    assert [rank["stopped"] for rank in kept] == [(2, 3)] * 2


def test_all_gather_keeps_nesting_and_takes_unequal_lengths(kept):
    for rank in kept:
        gathered = rank["gathered"]
        assert gathered["equal"].tolist() == [[0, 7], [1, 7]]
        (ragged, scalars), text = gathered["nested"]
        assert text == "text"
        assert [part.tolist() for part in ragged] == [[0.0], [0.0, 1.0]]
        assert scalars.tolist() == [0, 1]
        assert rank["half"].dtype is torch.bfloat16
        assert rank["half"].tolist() == [[[0.0], [0.0]], [[1.0], [1.0]]]
        assert rank["flags"].tolist() == [[False], [True]]
        assert [list(part.shape) for part in rank["none on one"]] == [[0, 3], [1, 3]]


def test_all_gather_of_incompatible_tensors_is_an_error_on_every_rank(kept):
    for rank in kept:
        assert "rank 0 has the shape [2, 2] and rank 1 [2, 3]" in rank["other shapes"]
        assert "rank 0 and rank 1 have tensors of different types" in rank["other types"]


def test_broadcast_and_barrier(kept):
    for rank in kept:
        assert rank["broadcast"] == [{"from": 0}, {"from": 1}]
        assert rank["barrier"] is None


class Differs(Net):
    def training_step(self, batch, batch_idx):
        self.log("everywhere", 1.0, sync_dist=True)
        if self.global_rank == 1:
            self.log("here_only", 1.0, sync_dist=True)
        return super().training_step(batch, batch_idx)


def log_different_metrics():
    ddp().fit(Differs(), DataLoader(samples(), batch_size=4))


def test_different_metrics_on_ranks_are_an_error_that_names_key_and_rank(tmp_path):
    ranks = failed(tmp_path, log_different_metrics)
    assert any(
        "ranks 0 and 1 logged different metrics with sync_dist: 'here_only' is not the same on both"
        in rank.error
        for rank in ranks
    )


class Unequal(Net):
    def on_train_epoch_end(self):
        self.all_gather([torch.ones(2)] * (1 + self.global_rank))


def gather_different_numbers():
    ddp().fit(Unequal(), DataLoader(samples(), batch_size=8))


def test_all_gather_of_different_numbers_of_tensors_is_an_error_on_every_rank(tmp_path):
    assert any(
        "different numbers of tensors, [1, 2]" in rank.error
        for rank in failed(tmp_path, gather_different_numbers)
    )
