"""Outputs at the end of epochs, and metrics of steps, over two ranks with unequal shards."""

import pytest
import torch
from several_ranks import kept_by
from torch.nn import functional
from torch.utils.data import DataLoader

from geartrain import hookimpl

from .cases import Net, ddp, samples


class Gathers(Net):
    def __init__(self):
        super().__init__()
        self.found = {}

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        return self(x)

    def validation_epoch_end(self, outputs):
        self.gather("validated", outputs)

    def test_step(self, batch, batch_idx):
        x, _ = batch
        tensors = self(x)
        return tensors

    def test_epoch_end(self, outputs):
        self.gather("my_reduced_metric", outputs)

    def gather(self, name, outputs):
        self.found[name + " shapes"] = [list(tensor.shape) for tensor in outputs]
        self.found[name + " as it is"] = self.all_gather(outputs)
        mean = torch.mean(torch.cat(list(self.all_gather(torch.cat(outputs)))))
        if self.trainer.is_global_zero:
            self.log(name, mean, rank_zero_only=True)


class Logs(Net):
    def training_step(self, batch, batch_idx):
        rank = self.global_rank
        self.log("sum", 1.0 + rank, on_step=True, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("mean", 1.0 + rank, on_step=True, on_epoch=True, sync_dist=True)
        self.log(
            "max",
            float(batch_idx + rank),
            on_step=True,
            on_epoch=True,
            reduce_fx="max",
            sync_dist=True,
        )
        return super().training_step(batch, batch_idx)


class Many(Net):
    def __init__(self, metrics):
        super().__init__()
        self.metrics = metrics

    def training_step(self, batch, batch_idx):
        for i in range(self.metrics):
            self.log(f"metric_{i}", float(i), on_step=True, on_epoch=False, sync_dist=True)
        x, y = batch
        return functional.mse_loss(self(x), y)


class Counts:
    """Counts the collectives between two steps, which are those of the flush."""

    def __init__(self):
        self.of_flush, self.open = [], False

    @hookimpl(wrapper=True)
    def log_sync(self):
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


def gather_and_log():
    """Run the cases. Seven samples in batches of two are 2 + 2 on rank 0 and 2 + 1 on rank 1."""
    found = {}
    seven = DataLoader(samples(7), batch_size=2)
    module, trainer = Gathers(), ddp()
    found["validate"] = trainer.validate(module, seven)[0]
    found["test"] = trainer.test(module, seven)[0]
    logging = ddp()
    logging.fit(Logs(), DataLoader(samples(6), batch_size=1))
    found["logged"] = dict(logging.run.metrics)
    for metrics in (1, 300):
        counts = Counts()
        ddp(plugins=[counts]).fit(Many(metrics), DataLoader(samples(16), batch_size=2))
        # Without the last step, after which the epoch ends too.
        found[f"collectives of {metrics}"] = counts.of_flush[:-1]
    return {**found, **module.found}


kept = kept_by(gather_and_log)


def outputs_of_one_process():
    module, data = Net().eval(), samples(7)
    with torch.no_grad():
        return module(data.tensors[0])


@pytest.mark.parametrize(
    ("command", "name"), [("validate", "validated"), ("test", "my_reduced_metric")]
)
def test_the_mean_over_both_ranks_outputs_is_logged_by_rank_0_alone(kept, command, name):
    expected = outputs_of_one_process().mean().item()
    assert kept[0][command] == {name: pytest.approx(expected, abs=1e-7)}
    assert name not in kept[1][command]


@pytest.mark.parametrize("name", ["validated", "my_reduced_metric"])
def test_outputs_are_this_ranks_and_a_list_of_them_is_gathered_tensor_by_tensor(kept, name):
    assert [rank[f"{name} shapes"] for rank in kept] == [[[2, 1], [2, 1]], [[2, 1], [1, 1]]]
    whole = outputs_of_one_process()
    for rank in kept:
        first, second = rank[f"{name} as it is"]
        # [world, samples, 1]: both ranks' first batches have two samples.
        assert list(first.shape) == [2, 2, 1]
        assert [list(part.shape) for part in second] == [[2, 1], [1, 1]]
        gathered = torch.cat([*first, *second])
        assert torch.allclose(gathered.sort(dim=0)[0], whole.sort(dim=0)[0])


def test_sums_means_and_extremes_of_steps_and_of_the_epoch(kept):
    """Rank 0 logs 1 and rank 1 logs 2, in each of three batches."""
    for rank in kept:
        logged = rank["logged"]
        assert (logged["sum_step"], logged["sum_epoch"]) == (3.0, 9.0)
        assert (logged["mean_step"], logged["mean_epoch"]) == (1.5, 1.5)
        # The maximum of the last batch, and of all: 2 + 1.
        assert (logged["max_step"], logged["max_epoch"]) == (3.0, 3.0)


def test_a_flush_is_two_collectives_however_many_metrics(kept):
    for rank in kept:
        assert rank["collectives of 1"] == rank["collectives of 300"] == [2, 2, 2]
