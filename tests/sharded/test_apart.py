"""Ranks that part: one rank alone calls a collective, or its loss needs no weights.

The run ends with the name of the rank, long before the strategy's timeout.
"""

import re
import time

import pytest
import torch
import torch.distributed as dist
from regression import Net, one_trainer, samples
from several_ranks import results
from torch.utils.data import DataLoader

from .cases import UNITS

pytestmark = pytest.mark.timeout(120)

STRATEGIES = {
    "fsdp": UNITS,
    "ddp_sharded": {},
    "tensor_parallel": {"colwise": ["first"], "rowwise": ["second"]},
}
#: tests/drills/rank_asymmetry.py has others.
EVENTS = {
    "all_gather": lambda module: module.all_gather(torch.ones(3)),
    "save": lambda module: module.trainer.save_checkpoint("lone.ckpt"),
    "torch": lambda module: dist.all_reduce(torch.ones(3)),
    "forward": lambda module: module(torch.ones(2, 3)),
    "whole": lambda module: [p.full_tensor() for p in module.parameters()],
}
LOSSES = {
    "leaf": lambda: torch.zeros((), requires_grad=True),
    "without gradient": lambda: torch.tensor(0.0),
    "none": lambda: None,
}
#: One event or loss for each way to find it, for the default suite.
USUAL = {
    ("fsdp", "all_gather", True),
    ("ddp_sharded", "forward", False),
    ("tensor_parallel", "torch", True),
    ("tensor_parallel", "forward", True),
}
CASES = [
    pytest.param(*case, marks=[] if case in USUAL else pytest.mark.matrix)
    for strategy in STRATEGIES
    for event in EVENTS
    for case in [(strategy, event, False), (strategy, event, True)]
    # Within a step of ddp_sharded the weights are whole.
    if case not in [("ddp_sharded", "forward", True), ("ddp_sharded", "whole", True)]
]


class Parts(Net):
    """Rank 1 alone does something in its second batch: after it, or within its forward."""

    def __init__(self, event, within=False):
        super().__init__()
        self.event, self.within, self.since = event, within, 0.0

    def alone(self, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            self.since = time.time()
            EVENTS[self.event](self)

    def forward(self, x, extra=True):
        hidden = torch.tanh(self.first(x))
        if self.within and len(x) == 6:  # not the forward of an event
            self.alone(self.trainer.run.batch_idx)
        return self.last(self.extra(self.second(hidden)))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.event in LOSSES and batch_idx == 1 and self.global_rank == 1:
            self.since = time.time()
            return LOSSES[self.event]()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.event in EVENTS and not self.within:
            self.alone(batch_idx)


def part(strategy, options, event, within=False):
    """Return the error of a fit and its notes, and the seconds that it took on rank 1."""
    module = Parts(event, within)
    trainer = one_trainer(strategy=strategy, strategy_options=options, devices=2)
    try:
        trainer.fit(module, DataLoader(samples(), 6))
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return text, time.time() - module.since if module.since else 0.0
    return "no error", 0.0


def assert_named(ends, message):
    texts = [text for text, _ in ends]
    assert any(re.search(message, text) for text in texts), texts
    assert "no error" not in texts
    assert 0 < ends[1][1] < 15


@pytest.mark.parametrize(("strategy", "event", "within"), CASES)
def test_a_collective_of_one_rank_alone_ends_the_run(tmp_path, strategy, event, within):
    line = r"test_apart.py:\d+"
    message = f"different collectives: rank 0 in .* \\(.*{line}\\); rank 1 in .* \\(.*{line}\\)"
    if event == "save" and strategy == "ddp_sharded" and within:  # also on all ranks
        message = "rank 1 saves a checkpoint within a forward, which needs whole weights. Fix: "
    if event == "forward" and strategy != "fsdp" and not within:  # torch itself refuses it
        message = rf"{line}: each rank has a part of this parameter"
    assert_named(results(tmp_path, part, strategy, STRATEGIES[strategy], event, within), message)


@pytest.mark.parametrize(
    ("strategy", "event"),
    [
        pytest.param(strategy, event, marks=[] if i == j else pytest.mark.matrix)
        for i, strategy in enumerate(STRATEGIES)
        for j, event in enumerate(LOSSES)
    ],
)
def test_a_loss_of_one_rank_that_needs_no_weights_ends_the_run(tmp_path, strategy, event):
    ends = results(tmp_path, part, strategy, STRATEGIES[strategy], event)
    of_rank_1 = r"rank 1 (in the reduction of|did not use)|None on rank 1"
    assert_named(ends, f"{of_rank_1}|the loss of Parts.training_step has requires_grad=False")
