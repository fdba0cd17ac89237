"""Time from a killed rank to the next trained step: ``--max-restarts`` beside torchrun.

python benchmarks/restarts.py [--repeats 5] [--ranks 1,2]

A rank gets SIGKILL in step 6, after 15 seconds. torchrun runs a script written by hand that does
the same work: DDP on gloo, a checkpoint after each epoch, and the resume. The two take turns. The
time ends when rank 0 has done the first step after the restart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

def data():
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))

def fault(rank, ranks, step):
    if rank == ranks - 1 and step == 6 and not os.path.exists("fault"):
        time.sleep(15)  # the run has trained for a while: the next process is ready
        with open("fault", "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

def stepped(rank):
    if rank == 0 and os.path.exists("fault") and not os.path.exists("after"):
        with open("after", "w") as file:
            file.write(str(time.time()))
"""
MODULE = """
from common import *
import geartrain as gt

class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.layers = make()

    def training_step(self, batch, batch_idx):
        fault(self.trainer.global_rank, self.trainer.world_size, self.trainer.global_step + 1)
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        stepped(self.trainer.global_rank)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self):
        return DataLoader(data(), batch_size=32, shuffle=True)
"""
BY_HAND = """
from common import *
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

# torchrun's store outlives the restart, and gloo would find the addresses of the dead ranks in it.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("restart " + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
torch.manual_seed(1)
model = DistributedDataParallel(make())
optimizer = torch.optim.Adam(model.parameters())
samples = data()
sampler = DistributedSampler(samples)
loader = DataLoader(samples, batch_size=32, sampler=sampler)
first = step = 0
if os.path.exists("last.ckpt"):
    state = torch.load("last.ckpt", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first, step = state["epoch"], state["step"]
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        fault(rank, ranks, step + 1)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step += 1
        stepped(rank)
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1, "step": step}, "last.ckpt.part")
        os.replace("last.ckpt.part", "last.ckpt")
    dist.barrier()
dist.destroy_process_group()
"""


def measure(name: str, ranks: int) -> float:
    """Return the seconds from the fault to the end of the next step."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"common.py": COMMON, "net.py": MODULE, "by_hand.py": BY_HAND}
        for file, text in files.items():
            Path(folder, file).write_text(text)
        programs = Path(sys.executable).parent
        strategy = ["--strategy", "ddp", "--devices", str(ranks)] if ranks > 1 else []
        commands = {
            "geartrain": [
                *(str(programs / "geartrain"), "fit", "net.py", "--accelerator", "cpu", "-q"),
                *("--seed", "1", "--max-epochs", "3", "--output", "run", "--max-restarts", "1"),
                *strategy,
            ],
            "torchrun": [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(ranks), "--max-restarts", "1", "by_hand.py"),
            ],
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            commands[name], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        times = [float(Path(folder, file).read_text()) for file in ("fault", "after")]
        return times[1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", default="1,2")
    given = parser.parse_args()
    for ranks in map(int, given.ranks.split(",")):
        seconds: dict[str, list[float]] = {"geartrain": [], "torchrun": []}
        for _ in range(given.repeats):
            for name, values in seconds.items():
                values.append(measure(name, ranks))
        for name, values in seconds.items():
            listed = ", ".join(f"{value:.2f}" for value in values)
            print(f"{ranks} ranks, {name}: median {statistics.median(values):.2f} s ({listed})")


if __name__ == "__main__":
    main()
