"""self.log, should_stop, the outputs of epochs and the collectives on two ranks."""

import pytest
import torch
from regression import Net, samples
from threads import on_threads
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl


def metrics_of(strategy):
    return [run.metrics for run in strategy.runs]


def validated(module, n, batch_size=2, ranks=2):
    """Return each rank's metrics after a validation of ``n`` samples."""
    trainer, strategy = on_threads(ranks)
    trainer.validate(module, DataLoader(samples(n), batch_size=batch_size))
    return metrics_of(strategy)


# --- metrics --------------------------------------------------------------------------------------


class Logs(Net):
    """Logs numbers of one rank."""

    def validation_step(self, batch, batch_idx):
        rank = self.global_rank
        self.log("own", float(rank))
        if rank == 0:
            self.log("first only", 3.0, rank_zero_only=True)
        self.log("asked everywhere", 4.0 + rank, rank_zero_only=True)


def test_metrics_that_are_not_synced():
    with pytest.warns(
        UserWarning, match="validate: own is of rank 0's part of the data alone. Fix: self.log"
    ):
        first, second = validated(Logs(), 3)
    assert (first["own"], second["own"]) == (0.0, 1.0)
    assert first["first only"] == 3.0
    assert "first only" not in second
    assert first["asked everywhere"] == 4.0


class Numbered(Net):
    """Logs the batch's number (plus 2 on rank 1), and a scheduler's metric, rising on rank 0."""

    def training_step(self, batch, batch_idx):
        self.log("synced", float(batch_idx + 2 * self.global_rank), sync_dist=True)
        self.log("own", float(-batch_idx if self.global_rank else batch_idx))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "own"},
        }


def test_between_flushes_one_rank_or_all_may_read_metrics():
    seen = [], []

    class Asks:
        @hookimpl
        def on_step_end(self, run):
            own, rank = seen[run.world.rank], run.world.rank
            if rank == run.step % 2:
                own.append(run.trainer.callback_metrics["synced"].item())
            run.logs.refresh("synced")
            own.append(run.metrics["synced"])

    trainer, strategy = on_threads(plugins=[Asks()], max_epochs=1, log_every_n_steps=50)
    trainer.fit(Numbered(), DataLoader(samples(16), batch_size=2))
    # Rank 0 reads alone after steps 2 and 4, rank 1 after steps 1 and 3; together they read means.
    assert seen == ([1.0, 1.0, 2.0, 3.0, 3.0, 4.0], [2.0, 1.0, 2.0, 4.0, 3.0, 4.0])
    first, second = (run.optimizers[0].param_groups[0]["lr"] for run in strategy.runs)
    assert first == second == 1e-3 * 0.5**3  # rank 0's rises; rank 1's falls


def test_a_rank_without_samples_may_log_at_the_end_of_the_epoch():
    class EndOnly(Net):
        def validation_step(self, batch, batch_idx):
            self.log("in_step", 5.0, sync_dist=True)

        def on_validation_epoch_end(self):
            self.log("at_the_end", float(self.global_rank), sync_dist=True)

    assert validated(EndOnly(), 1) == [{"in_step": 5.0, "at_the_end": 0.5}] * 2


def test_a_rank_may_have_samples_of_one_loader_and_none_of_another():
    class InSteps(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("rows", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    trainer, strategy = on_threads(2)
    trainer.validate(InSteps(), [DataLoader(samples(n), batch_size=2) for n in (1, 5)])
    assert (
        metrics_of(strategy) == [{"rows/dataloader_idx_0": 1.0, "rows/dataloader_idx_1": 5.0}] * 2
    )


def test_sums_means_and_extremes_of_steps_and_of_the_epoch():
    """1 on rank 0 and 2 on rank 1, in each of three batches."""

    class Trains(Net):
        def training_step(self, batch, batch_idx):
            rank, both = self.global_rank, {"on_step": True, "on_epoch": True, "sync_dist": True}
            self.log("sum", 1.0 + rank, reduce_fx="sum", **both)
            self.log("mean", 1.0 + rank, **both)
            self.log("max", float(batch_idx + rank), reduce_fx="max", **both)
            return super().training_step(batch, batch_idx)

    trainer, strategy = on_threads()
    trainer.fit(Trains(), DataLoader(samples(6), batch_size=1))
    for logged in metrics_of(strategy):
        assert (logged["sum_step"], logged["sum_epoch"]) == (3.0, 9.0)
        assert (logged["mean_step"], logged["mean_epoch"]) == (1.5, 1.5)
        assert (logged["max_step"], logged["max_epoch"]) == (
            3.0,
            3.0,
        )  # of the last batch, and of all: 2 + 1


class Many(Net):
    def __init__(self, metrics):
        super().__init__()
        self.metrics = metrics

    def training_step(self, batch, batch_idx):
        for i in range(self.metrics):
            self.log(f"metric_{i}", float(i), sync_dist=True)
        return nn.functional.mse_loss(self(batch[0]), batch[1])


class Counts:
    """Records the numbers in each log_sync, and the calls between two steps."""

    def __init__(self):
        self.calls, self.of_flush, self.open = [], [], False

    @hookimpl(wrapper=True)
    def log_sync(self, values):
        self.calls.append(len(values))
        if self.open:
            self.of_flush[-1] += 1
        return (yield)

    @hookimpl
    def on_step_end(self):
        self.of_flush.append(0)
        self.open = True

    @hookimpl(wrapper=True)
    def forward(self):
        self.open = False
        return (yield)


def test_many_metrics_take_as_many_collectives_as_one():
    def counted(metrics):
        trainer, strategy = on_threads(plugins=[Counts()])
        trainer.fit(Many(metrics), DataLoader(samples(16), batch_size=2))
        return [
            next(p.plugin for p in run.trainer.setup.parts if isinstance(p.plugin, Counts))
            for run in strategy.runs
        ]

    for one, many in zip(counted(1), counted(300), strict=True):
        assert len(one.calls) == len(many.calls) <= 17
        assert (
            one.of_flush[:-1] == many.of_flush[:-1] == [2, 2, 2]
        )  # after the last step the epoch ends too


def test_different_metrics_on_ranks_are_an_error_that_names_key_and_ranks():
    class Differs(Net):
        def training_step(self, batch, batch_idx):
            self.log("everywhere", 1.0, sync_dist=True)
            if self.global_rank == 1:
                self.log("here_only", 1.0, sync_dist=True)
            return super().training_step(batch, batch_idx)

    trainer, _ = on_threads()
    with pytest.raises(
        gt.TrainingError,
        match="ranks 0 and 1 logged different metrics with sync_dist: 'here_only' is not the same",
    ):
        trainer.fit(Differs(), DataLoader(samples(8), batch_size=4))


def test_should_stop_on_one_rank_stops_all_in_the_same_step():
    class Stops(Net):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1 and self.current_epoch == 1:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    trainer, strategy = on_threads(max_epochs=50)
    trainer.fit(Stops(), DataLoader(samples(16), batch_size=4))
    assert [(run.epoch, run.step) for run in strategy.runs] == [(2, 3)] * 2


# --- collectives ----------------------------------------------------------------------------------


def on_each(function, ranks=2):
    """Return the results of ``function(module)`` in a test step of each rank."""
    found = {}

    class Calls(Net):
        def test_step(self, batch, batch_idx):
            found[self.global_rank] = function(self)

    trainer, _ = on_threads(ranks)
    trainer.test(Calls(), DataLoader(samples(ranks)))
    return [found[rank] for rank in range(ranks)]


def test_all_gather_takes_tensors_that_need_gradients_small_types_and_no_elements():
    def gather(module):
        rank = module.global_rank
        return (
            module.all_gather(torch.arange(float(rank + 1)).requires_grad_()),
            module.all_gather(torch.full((2, 2), rank, dtype=torch.bfloat16)[:, :1]),
            module.all_gather(torch.tensor([rank == 1])),
            module.all_gather(torch.zeros(rank, 3)),
        )

    for ragged, half, flags, none_on_one in on_each(gather):
        assert [part.tolist() for part in ragged] == [[0.0], [0.0, 1.0]]
        assert not any(part.requires_grad for part in ragged)
        assert half.dtype is torch.bfloat16
        assert half.tolist() == [[[0.0], [0.0]], [[1.0], [1.0]]]
        assert flags.tolist() == [[False], [True]]
        assert [list(part.shape) for part in none_on_one] == [[0, 3], [1, 3]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda rank: torch.zeros(2, 2 + rank),
            r"rank 0 has the shape \[2, 2\] and rank 1 \[2, 3\]",
        ),
        (
            lambda rank: torch.zeros(2).to([torch.float32, torch.float64][rank]),
            "rank 0 and rank 1 have tensors of different types",
        ),
        (lambda rank: [torch.ones(2)] * (1 + rank), r"different numbers of tensors, \[1, 2\]"),
    ],
)
def test_all_gather_of_tensors_that_do_not_fit_is_an_error_on_every_rank(make, message):
    def gather(module):
        with pytest.raises(gt.TrainingError, match=message):
            module.all_gather(make(module.global_rank))
        return True

    assert on_each(gather) == [True, True]


def test_gathered_tensors_are_copies_for_each_rank():
    """A rank's changes of its input or its result do not change those of another."""

    def gather(module):
        mine = torch.ones(2)
        equal, ragged = (
            module.all_gather(mine),
            module.all_gather(torch.ones(1 + module.global_rank)),
        )
        for tensor in (mine, equal, *ragged):
            tensor += 1
        module.trainer.run.hooks.barrier(run=module.trainer.run)
        return equal.tolist(), [part.tolist() for part in ragged]

    assert on_each(gather) == [([[2.0, 2.0]] * 2, [[2.0], [2.0, 2.0]])] * 2


# --- outputs at the end of an epoch ---------------------------------------------------------------


class Gathers(Net):
    """Seven samples in batches of two: 2 + 2 on rank 0 and 2 + 1 on rank 1."""

    def test_step(self, batch, batch_idx):
        return self(batch[0])

    def test_epoch_end(self, outputs):
        self.outputs, self.gathered = outputs, self.all_gather(outputs)
        mean = torch.mean(torch.cat(list(self.all_gather(torch.cat(outputs)))))
        if self.trainer.is_global_zero:
            self.log("tested", mean, rank_zero_only=True)


def test_outputs_are_this_ranks_and_the_mean_over_all_is_logged_by_rank_0_alone():
    trainer, strategy = on_threads()
    trainer.test(Gathers(), DataLoader(samples(7), batch_size=2))
    with torch.no_grad():
        whole = Net().eval()(samples(7).tensors[0])
    first, second = strategy.runs
    assert first.metrics == {"tested": pytest.approx(whole.mean().item(), abs=1e-7)}
    assert "tested" not in second.metrics
    assert [list(tensor.shape) for tensor in first.module.outputs] == [[2, 1], [2, 1]]
    assert [list(tensor.shape) for tensor in second.module.outputs] == [[2, 1], [1, 1]]
    for run in (first, second):
        stacked, rest = run.module.gathered
        # [world, samples, 1]: both ranks' first batches have two samples.
        assert list(stacked.shape) == [2, 2, 1]
        assert [list(part.shape) for part in rest] == [[2, 1], [1, 1]]
