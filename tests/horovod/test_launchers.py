"""Launchers of ranks under Horovod: geartrain, horovodrun, torchrun; and the failure of a rank."""

import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest

from geartrain_testing.launching import Launched, free_port, launched

pytest.importorskip("geartrain_ddp", reason="geartrain-ddp is not installed")
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(300)]
SCRIPTS = Path(sysconfig.get_path("scripts"))
TRAIN = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import geartrain as gt

class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        if sys.argv[1:] == ["raise"] and self.trainer.global_rank == 1 and batch_idx == 2:
            raise KeyError("my own error")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

fits = [{}] if sys.argv[1:] == ["once"] else [{}, {"op": "sum", "timeline": "timeline.json"}, {}]
fits += ["ddp"] if sys.argv[1:] == ["ddp"] else []
for number, options in enumerate(fits):
    module = Net()
    ours = {"strategy": "horovod", "strategy_options": options}
    if options == "ddp":
        ours = {"strategy": "ddp", "devices": 3}
    ours = {"devices": int(os.environ.get("DEVICES", "1")), **ours}
    trainer = gt.Trainer(accelerator="cpu", max_epochs=1, enable_progress_bar=False, **ours)
    torch.manual_seed(trainer.global_rank)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(32, 3)), 4))
    if number == 0:
        print("PLAN", trainer.plan.processes, dict(trainer.plan.notes)["learning rates"])
    weights = module.layer.weight.tolist()
    print(f"RUN {number} RANK {trainer.global_rank} OF {trainer.world_size}: {weights}", flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def trained(text, ranks, fits=1):
    """Check that all ranks have the same weights after every fit."""
    found = {}
    for number, rank, size, weights in re.findall(r"RUN (\d) RANK (\d) OF (\d): (.*)", text):
        assert int(size) == ranks
        found.setdefault(int(number), {})[int(rank)] = weights
    assert sorted(found) == list(range(fits)), text
    for by_rank in found.values():
        assert sorted(by_rank) == list(range(ranks)), text
        assert len(set(by_rank.values())) == 1, text


def horovodrun(folder, *arguments, ranks=2, **environment):
    options = f"-np {ranks} --gloo --network-interfaces lo".split()
    command = [str(SCRIPTS / "horovodrun"), *options, sys.executable, *arguments]
    return Launched(command, folder, {"PATH": f"{SCRIPTS}:{os.environ['PATH']}", **environment})


def test_geartrain_starts_the_ranks_and_fits_follow_each_other(folder):
    with launched("train.py", folder=folder, DEVICES="2") as run:
        run.succeed(120)
        logs = run.out
        assert run.left_behind() == []
    assert "RUN 2 RANK 0 OF 2" in logs
    assert (folder / "timeline.json").read_text().count("ALLREDUCE") > 8
    assert "PLAN 2 × 2 (scale_lr, 2 worker(s))" in logs


def test_horovodrun_decides_the_world(folder):
    """Another strategy joins horovodrun's ranks, too."""
    run = horovodrun(folder, "train.py", "ddp", ranks=3, DEVICES="1")
    try:
        run.succeed(120)
        trained(run.out, 3, fits=4)
        assert "PLAN None × 3 (scale_lr, 3 worker(s))" in run.out
        assert (folder / "timeline.json").read_text().count("ALLREDUCE") > 8
        assert run.left_behind() == []
    finally:
        run.kill()


def test_a_rank_that_raises_under_horovodrun_ends_all(folder):
    run = horovodrun(folder, "train.py", "raise")
    try:
        assert run.wait(60) != 0
        assert "KeyError: 'my own error'" in run.err
        assert "a peer has gone" in run.err
        assert "RUN 0" not in run.out
        assert run.left_behind() == []
    finally:
        run.kill()


def test_under_torchrun(folder):
    port = str(free_port())
    options = ["--nproc-per-node", "2", "--master-port", port]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py", "once"]
    run = Launched(command, folder)
    try:
        run.succeed(120)
        trained(run.out, 2)
    finally:
        run.kill()
