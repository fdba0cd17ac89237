"""Things that happen on one rank only: the run gives the result of all ranks, or one clear error.

Every cell is an event, a strategy and the rank of the event. Ranks of ddp and bagua are started by
hand, so each has its own error. The starter of ddp_spawn or elastic has one error.
"""

import importlib
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
from several_ranks import run
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import geartrain as gt

#: Seconds for a cell, with the start of its ranks. A rank that hangs is ended.
SECONDS = 60
APART = "the ranks are in different collectives: "
#: Event -> the error, in which ``{one}`` is the rank of the event; ``None`` for the result of one
#: process.
EVENTS = {
    "import": None,
    "warning": None,
    "file": None,
    "environment": None,
    "slow": None,
    "log": None,
    "nan": None,
    "empty": "the training loaders of ranks [{one}] gave no batch, and the others' did",
    "weight": "rank 1 differs from rank 0: the weight first.weight",
    "rate": "rank 1 differs from rank 0: lr of group 0 of optimizer 0 (SGD) is ",
    "freeze": "rank 1 differs from rank 0: requires_grad of first.bias is ",
    "error": "OwnError: the user's own error",
    "log with sync_dist": "ranks 0 and 1 logged different metrics with sync_dist: 'mine'",
    "unused": "rank {one} did not use these parameters in a step: last.weight, last.bias. "
    "Fix: --strategy.find_unused_parameters true",
    "all_gather": APART,
    "all_gather at the end": APART,
    "barrier": APART,
    "broadcast": APART,
}
#: The messages of bagua, which has no DDP.
BAGUA = {"unused": "2 parameters got no gradient in this step"}
#: The cells that run by default; the others are a drill.
DEFAULT = {
    ("all_gather", "ddp", 0),
    ("barrier", "ddp", 1),
    ("import", "ddp", 0),
    ("unused", "ddp", 1),
    ("all_gather", "bagua", 0),
    ("empty", "ddp", 1),
}


class OwnError(Exception):
    pass


class Numbers(IterableDataset):
    """Eight batches; none on the rank of the event."""

    def __init__(self, is_empty):
        self.is_empty = is_empty

    def __iter__(self):
        yield from () if self.is_empty() else torch.ones(16, 4)


class Net(gt.Module):
    def __init__(self, event, one):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.event, self.one = event, one

    def is_now(self, event, batch_idx=2):
        return (event, self.one) == (self.event, self.global_rank) and batch_idx == 2

    def training_step(self, batch, batch_idx):
        x = batch[0] if isinstance(batch, list) else batch
        strategy, hidden = self.trainer.strategy, self.first(x)
        if self.is_now("import", batch_idx):
            importlib.import_module("torchmetrics")
        if self.is_now("warning", batch_idx):
            warnings.warn("on one rank", stacklevel=1)
        if self.is_now("file", batch_idx):
            Path(f"run/own-{self.one}").write_text("on one rank")
        if self.is_now("environment", batch_idx):
            os.environ["ON_ONE_RANK"] = "1"
        if self.is_now("slow", batch_idx):
            time.sleep(3)  # longer than the first pause of a rank that waits
        if self.is_now("log", batch_idx):
            self.log("mine", 1.0)
        if self.is_now("log with sync_dist", batch_idx):
            self.log("mine", 1.0, sync_dist=True)
        if self.is_now("weight", batch_idx):
            self.first.weight.data[0, 0] += 1e-6
        if self.is_now("rate", batch_idx):
            self.optimizers().param_groups[0]["lr"] = 0.2
        if self.is_now("error", batch_idx):
            raise OwnError("the user's own error")
        if self.is_now("all_gather", batch_idx):
            self.all_gather(x)
        if self.is_now("barrier", batch_idx):
            strategy.barrier()
        if self.is_now("broadcast", batch_idx):
            strategy.broadcast("x")
        output = hidden if self.is_now("unused", batch_idx) else self.last(hidden)
        loss = output.square().mean() * (float("nan") if self.is_now("nan", batch_idx) else 1.0)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_start(self):
        if self.is_now("freeze"):
            self.first.bias.requires_grad_(False)

    def on_train_epoch_end(self):
        if self.is_now("all_gather at the end"):
            self.all_gather(torch.ones(3))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy, event, one):
    """Train on two ranks; return the weights and the number of steps."""
    options = {"start_method": "fork"} if strategy == "ddp_spawn" else {}
    module = Net(event, one)
    data = TensorDataset(torch.ones(32, 4))
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        strategy_options={"timeout": 50.0, **options},
        max_epochs=2,
        enable_progress_bar=False,
        log_every_n_steps=1,
        output="run",
    )
    loader = (
        DataLoader(Numbers(lambda: module.is_now("empty")), batch_size=2)
        if event == "empty"
        else DataLoader(data, batch_size=2)
    )
    trainer.fit(module, loader)
    return {name: p.detach() for name, p in module.named_parameters()}, trainer.global_step


def cells():
    for event in EVENTS:
        for strategy in ("ddp", "ddp_spawn", "bagua", "elastic"):
            if (event, strategy) == ("unused", "elastic"):
                continue  # no error: gradients of the rank are zeros
            for one in (0, 1):
                marks = () if (event, strategy, one) in DEFAULT else pytest.mark.drill
                yield pytest.param(event, strategy, one, marks=marks)


@pytest.mark.parametrize(("event", "strategy", "one"), [*cells()])
def test_an_event_on_one_rank(tmp_path, event, strategy, one):
    starts = strategy in ("ddp_spawn", "elastic")
    by_hand = {"ranks": 1, "place": "alone"} if starts else {}
    ranks = run(tmp_path, train, strategy, event, one, seconds=SECONDS, **by_hand)
    printed = "\n".join(rank.printed for rank in ranks)
    expected = (BAGUA if strategy == "bagua" else {}).get(event, EVENTS[event])
    if expected == APART and strategy == "elastic":
        expected = "processes would deadlock"
    if expected is None:
        assert [rank.end for rank in ranks] == ["0"] * len(ranks), printed
        weights, steps = ranks[0].result
        assert steps == 16
        same = one_process()
        for name, weight in weights.items():
            if event == "nan":
                assert weight.isnan().all()
            else:
                torch.testing.assert_close(weight, same[name])
            assert all(
                torch.equal(rank.result[0][name].nan_to_num(7), weight.nan_to_num(7))
                for rank in ranks
            )
        return
    assert [rank.end for rank in ranks] == ["1"] * len(ranks), printed
    named = ranks[0 if starts else one].error
    assert expected.format(one=one) in named, printed
    if expected == APART and strategy != "elastic":
        assert f"rank {one} in " in named
        assert f"rank {1 - one} in " in named
        assert "test_rank_asymmetry.py:" in named


def one_process():
    """Return the weights after 16 steps in one process: every sample is the same."""
    module = Net("nothing", 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(16):
        optimizer.zero_grad()
        module.last(module.first(torch.ones(2, 4))).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}
