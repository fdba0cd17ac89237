"""Start to first step of two processes: ddp and ddp_spawn, against torchrun with a DDP script.

The same small model and data. Each program is measured from its start in the shell until rank 0 has
done its first optimizer step. The programs alternate; medians, and the median ratio of a round.

    python benchmarks/startup.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BY_HAND = """
import os, time, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
sampler = torch.utils.data.DistributedSampler(data)
for x, y in torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    if dist.get_rank() == 0 and os.environ.get("FIRST"):
        open(os.environ.pop("FIRST"), "w").write(repr(time.time()))
dist.destroy_process_group()
"""

OURS = """
import os, sys, time, torch, geartrain as gt
from torch import nn

class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)
    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class First:
    @gt.hookimpl
    def on_step_end(self, run):
        if run.world.rank == 0 and os.environ.get("FIRST"):
            open(os.environ.pop("FIRST"), "w").write(repr(time.time()))

data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
trainer = gt.Trainer(
    accelerator="cpu", strategy=sys.argv[1], devices=2, max_epochs=1, seed=0,
    enable_progress_bar=False, plugins=[First()],
)
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
"""


def seconds(command: list[str], folder: Path) -> float:
    """Return the time from the start of a program to its first step."""
    first = folder / "first"
    first.unlink(missing_ok=True)
    environment = {**os.environ, "FIRST": str(first), "OMP_NUM_THREADS": "1"}
    start = time.time()
    # The hand-written script sometimes aborts at its end, in a thread of gloo; only its first step
    # counts.
    subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, timeout=120
    )
    return float(first.read_text()) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "by_hand.py").write_text(BY_HAND)
        (folder / "ours.py").write_text(OURS)
        commands = {
            "torchrun": [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "by_hand.py",
            ],
            "ddp": [sys.executable, "ours.py", "ddp"],
            "ddp_spawn": [sys.executable, "ours.py", "ddp_spawn"],
        }
        rounds = [
            {name: seconds(command, folder) for name, command in commands.items()}
            for _ in range(options.rounds + 1)
        ][1:]
    facts: dict[str, float] = {
        f"{name}_s": round(statistics.median(one[name] for one in rounds), 2) for name in commands
    }
    for name, base in (("ddp", "torchrun"), ("ddp_spawn", "ddp")):
        facts[f"{name} / {base}"] = round(
            statistics.median(one[name] / one[base] for one in rounds), 2
        )
    print(json.dumps({**facts, "rounds": options.rounds}, indent=2))


if __name__ == "__main__":
    main()
