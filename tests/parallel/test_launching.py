"""Launching fails if the plan and the launcher disagree."""

import os
import subprocess
import sys

BY_HAND = {
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "12910",
    "WORLD_SIZE": "3",
    "NODE_RANK": "0",
    "LOCAL_RANK": "2",
}
DISAGREE = """
import sys, torch, geartrain as gt
from geartrain.parallel import ProcessGroupStrategy
class Strategy(ProcessGroupStrategy):
    @gt.hookimpl
    def plan_processes(self, request): return gt.Layout(2, 1)
    @gt.hookimpl
    def setup_process_group(self, run): ...
class Model(gt.Module):
    def training_step(self, batch, batch_idx): ...
    def configure_optimizers(self): ...
trainer = gt.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy=Strategy())
try:
    trainer.fit(Model(), [torch.ones(1)])
except gt.UsageError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def test_a_plan_that_disagrees_with_the_launcher_shows_both_numbers():
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "OMPI_", "PMI"))
    } | BY_HAND
    done = subprocess.run(
        [sys.executable, "-c", DISAGREE], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    for words in (
        "4 processes (2 on each of 2 nodes)",
        "environment started 3",
        "--devices 3 --num-nodes 1",
    ):
        assert words in done.stderr
