"""Memory of each rank for a model of 100 million parameters with Adam, by strategy.

Each rank prints the peak of its resident memory above that before the model was made, and after
the fit again, when rank 0 has gathered the weights. The formulas are 16 bytes for each parameter
under ddp (parameters, gradients, two states of Adam); under fsdp a part of that and the largest
layer; under ddp_sharded 4 bytes and a part of 16; under tensor_parallel a part of 16. There every
second layer is split by columns, and the others by rows.

    python benchmarks/sharded.py [--devices 2,4] [--layers 24] [--width 2048]

With ``--limit MIB`` each rank's memory is limited, after its imports, by a control group (root, and
cgroup version 1). fsdp on 4 ranks trains an epoch, saves a checkpoint, resumes from it and trains
another. One process tries the same, with a limit of its own.

    python benchmarks/sharded.py --limit 200 --width 1024
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

PROGRAM = """
import os, sys, torch
from torch import nn
import geartrain as gt
import torch.distributed.fsdp

def resident(name):
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(name)]
    return int(line.split()[1]) / 1024

class Net(gt.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        self.width = width
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def train_dataloader(self):
        return [torch.randn(8, self.width) for _ in range(4)]
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-5)

class Memory:
    @gt.hookimpl
    def on_train_end(self, run):
        peak = torch.tensor([resident("VmHWM") - before], dtype=torch.float64)
        table = run.hooks.log_sync(run=run, values=peak)
        if run.world.rank == 0:  # the output of others is in files
            print("PEAKS", *[round(mib) for mib in table[:, 0].tolist()], flush=True)

class Limit:
    @gt.hookimpl(wrapper=True)
    def wrap_model(self, run):
        group = f"/sys/fs/cgroup/memory/geartrain-{run.world.rank}"
        os.makedirs(group, exist_ok=True)
        for name, value in {"limit_in_bytes": limit << 20, "max_usage_in_bytes": 0}.items():
            with open(f"{group}/memory.{name}", "w") as file:
                file.write(str(value))
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        return (yield)

strategy, devices, layers, width, meta, limit, epochs = sys.argv[1], *map(int, sys.argv[2:])
before = resident("VmRSS")
if __name__ == "__main__":
    with torch.device("meta" if meta else "cpu"):
        module = Net(layers, width)
    options = {"enable_progress_bar": False, "use_distributed_sampler": False, "seed": 1}
    if strategy == "tensor_parallel":
        names = [f"net.{number}" for number in range(layers)]
        options["strategy_options"] = {"colwise": names[::2], "rowwise": names[1::2]}
    plugins = [Memory()]
    if limit:
        plugins, options["output"] = [Limit()], "run"
    trainer = gt.Trainer(accelerator="cpu", strategy=strategy, devices=devices, max_epochs=epochs,
                         plugins=plugins, **options)
    trainer.fit(module, ckpt_path="auto" if limit else None)
    if trainer.global_rank == 0:
        print(f"AFTER {resident('VmHWM') - before:.0f}", flush=True)
"""


def peaks(
    file: Path, strategy: str, devices: int, options: argparse.Namespace
) -> dict[str, object]:
    """Return MiB of each rank at the end of training, and the most after the fit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    meta = str(int(options.meta and strategy != "ddp"))
    command = [sys.executable, str(file), strategy, str(devices), str(options.layers)]
    done = subprocess.run(
        [*command, str(options.width), meta, "0", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found = re.search(r"PEAKS ([\d ]+)\nAFTER (\d+)", done.stdout)
    if found is None:
        raise SystemExit(f"{strategy} on {devices}:\n{done.stdout}\n{done.stderr}")
    ranks = list(map(int, found[1].split()))
    layer = options.width * (options.width + 1) * 4 / 2**20
    whole = layer * options.layers
    formula = {
        "ddp": 4 * whole,
        "fsdp": 4 * whole / devices + layer,
        "ddp_sharded": whole + 4 * whole / devices,
        "tensor_parallel": 4 * whole / devices,
    }[strategy]
    return {
        "MiB by rank": ranks,
        "formula": round(formula),
        "ratio": round(max(ranks) / formula, 3),
        "rank 0 after the fit": int(found[2]),
    }


def limited(
    file: Path, strategy: str, devices: int, epochs: int, options: argparse.Namespace
) -> str:
    """Train with limited memory; return the last line of the error if it fails."""
    meta = str(int(strategy != "single"))
    shape = [str(devices), str(options.layers), str(options.width), meta, str(options.limit)]
    done = subprocess.run(
        [sys.executable, str(file), strategy, *shape, str(epochs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode == 0:
        return "trained"
    return f"exit code {done.returncode} {done.stderr.strip().splitlines()[-1:]}"


def within_limit(file: Path, options: argparse.Namespace) -> dict[str, object]:
    """Return what fsdp and one process do with less memory than the training's tensors have."""
    parameters = options.layers * options.width * (options.width + 1)
    facts: dict[str, object] = {
        "MiB of parameters, gradients and states": round(16 * parameters / 2**20),
        "one process": limited(file, "single", 1, 1, options),
        "fsdp 4": limited(file, "fsdp", 4, 1, options),
    }
    facts["MiB of its checkpoint"] = round((file.parent / "run/last.ckpt").stat().st_size / 2**20)
    facts["fsdp 4 resumed"] = limited(file, "fsdp", 4, 2, options)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="2,4")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--meta", action="store_true", help="make the module on the meta device")
    parser.add_argument("--limit", type=int, help="MiB of memory of each rank")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.py")
        file.write_text(PROGRAM, encoding="utf-8")
        facts: dict[str, object] = {
            f"{strategy} {devices}": peaks(file, strategy, devices, options)
            for devices in map(int, options.devices.split(","))
            for strategy in ("ddp", "fsdp", "ddp_sharded", "tensor_parallel")
            if not options.limit
        }
        if options.limit:
            facts = within_limit(file, options)
    json.dump({**facts, **vars(options), "torch": torch.__version__}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
