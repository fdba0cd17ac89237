"""Launching fails if the plan and the launcher disagree."""

import pytest
from small_models import Net, loader

import geartrain as gt
from geartrain.parallel import ProcessGroupStrategy

BY_HAND = {
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "12910",
    "WORLD_SIZE": "3",
    "NODE_RANK": "0",
    "LOCAL_RANK": "2",
}


class Strategy(ProcessGroupStrategy):
    @gt.hookimpl
    def plan_processes(self):
        return gt.Layout(2, 1)

    @gt.hookimpl
    def setup_process_group(self): ...


def test_a_plan_that_disagrees_with_the_launcher_shows_both_numbers(monkeypatch):
    for name, value in BY_HAND.items():
        monkeypatch.setenv(name, value)
    trainer = gt.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy=Strategy())
    with pytest.raises(gt.UsageError) as refused:
        trainer.fit(Net(), loader())
    for words in (
        "4 processes (2 on each of 2 nodes)",
        "environment started 3",
        "--devices 3 --num-nodes 1",
    ):
        assert words in str(refused.value)
