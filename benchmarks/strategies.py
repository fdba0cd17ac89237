"""A step on two ranks: ddp, fsdp, elastic, bagua and horovod, beside loops written by hand.

The same model, data and optimizer, two processes with one thread each. The programs alternate; the
median step of each run, and the median ratio of a round. Both programs with Horovod are left out if
it is not installed.

    python benchmarks/strategies.py [--rounds 7] [--steps 300] [--width 64]
                                    [--tensors 300] [--programs "DDP by hand" ddp]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

MODEL = """
import os, statistics, sys, time, torch
from torch import nn

steps, width, tensors = (int(os.environ[name]) for name in ("STEPS", "WIDTH", "TENSORS"))
torch.manual_seed(0)
layers = [layer for _ in range(tensors // 2 - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(width, 10))
batches = [(torch.randn(32, width), torch.randint(0, 10, (32,))) for _ in range(steps)]
ends = []

def report():
    half = ends[len(ends) // 2 :]  # the first ones warm up
    times = [b - a for a, b in zip(half, half[1:])]
    print("microseconds:", statistics.median(times) * 1e6, flush=True)
"""

BY_HAND = """
def train(model, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        ends.append(time.perf_counter())
"""

DDP_BY_HAND = (
    MODEL
    + BY_HAND
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
train(model, torch.optim.SGD(model.parameters(), lr=0.01))
if dist.get_rank() == 0:
    report()
dist.destroy_process_group()
"""
)

FSDP_BY_HAND = (
    MODEL
    + BY_HAND
    + """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for layer in model:
    if sum(each.numel() for each in layer.parameters()) >= 1_000_000:
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh, reshard_after_forward=False)
train(model, torch.optim.SGD(model.parameters(), lr=0.01))
if dist.get_rank() == 0:
    report()
dist.destroy_process_group()
"""
)

HOROVOD_BY_HAND = (
    MODEL
    + BY_HAND
    + """
import horovod.torch as hvd
hvd.init()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train(model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))
if hvd.rank() == 0:
    report()
hvd.shutdown()
"""
)

OURS = (
    MODEL
    + """
import geartrain as gt

class Module(gt.Module):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class Clock:
    @gt.hookimpl
    def on_step_end(self, run):
        ends.append(time.perf_counter())

    @gt.hookimpl
    def on_run_end(self, run):  # also where the caller is no rank
        if run.world.rank == 0:
            report()

quiet = {"enable_progress_bar": False, "use_distributed_sampler": False, "plugins": [Clock()]}
trainer = gt.Trainer(accelerator="cpu", strategy=sys.argv[1], devices=2, max_epochs=1, **quiet)
if __name__ == "__main__":
    trainer.fit(Module(), batches)
"""
)


def commands(folder: Path) -> dict[str, list[str]]:
    """Return each program by its name in the results."""
    for name, text in (
        ("ddp_by_hand", DDP_BY_HAND),
        ("fsdp_by_hand", FSDP_BY_HAND),
        ("horovod_by_hand", HOROVOD_BY_HAND),
        ("ours", OURS),
    ):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    python, ours = sys.executable, str(folder / "ours.py")
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    found = {
        "DDP by hand": [*torchrun, str(folder / "ddp_by_hand.py")],
        "ddp": [python, ours, "ddp"],
        "FSDP by hand": [*torchrun, str(folder / "fsdp_by_hand.py")],
        "fsdp": [python, ours, "fsdp"],
        "ddp_sharded": [python, ours, "ddp_sharded"],
        "elastic": [python, ours, "elastic"],
        "bagua": [python, ours, "bagua"],
    }
    if find_spec("horovod") is not None:
        run = [str(Path(python).parent / "horovodrun"), "-np", "2", "--gloo"]
        found |= {
            "Horovod by hand": [*run, python, str(folder / "horovod_by_hand.py")],
            "horovod": [python, ours, "horovod"],
        }
    return found


def microseconds(command: list[str], options: argparse.Namespace) -> float:
    """Return the median step of rank 0."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "STEPS": str(options.steps),
        "WIDTH": str(options.width),
        "TENSORS": str(options.tensors),
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    _, found, figure = done.stdout.rpartition("microseconds:")
    if not found:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return float(figure.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64, help="of the hidden layers")
    parser.add_argument("--tensors", type=int, default=10, help="two a layer")
    parser.add_argument("--programs", nargs="+", help="default: all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = commands(Path(folder))
        chosen = options.programs or programs
        programs = {name: command for name, command in programs.items() if name in chosen}
        rounds = [
            {name: microseconds(command, options) for name, command in programs.items()}
            for _ in range(options.rounds)
        ]
    facts: dict[str, object] = {}
    for name in programs:
        by_hand = {"horovod": "Horovod by hand", "fsdp": "FSDP by hand"}.get(name, "DDP by hand")
        ratios = [one[name] / one[by_hand] for one in rounds]
        facts[name] = {
            "us": round(statistics.median(one[name] for one in rounds), 1),
            f"over {by_hand}": [round(value, 3) for value in statistics.quantiles(ratios, n=4)]
            if len(rounds) > 1
            else ratios,
        }
    json.dump(
        {**facts, **vars(options), "torch": torch.__version__, "python": sys.version.split()[0]},
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
