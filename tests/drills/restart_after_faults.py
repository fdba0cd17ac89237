"""Cause each kind of fault under each strategy, and print how the run went on, as a table.

A cell trains a small module on the command line with ``--max-restarts 2`` and one fault of
``--plugin chaos``. Run it by hand; pytest does not collect it::

    python tests/drills/restart_after_faults.py
    python tests/drills/restart_after_faults.py --strategies ddp --kinds kill,stop --show
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

TARGET = """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import geartrain as gt

class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        with open(f"steps-{self.trainer.global_rank}", "a") as file:
            file.write(f"{time.time()} {self.trainer.global_step + 1}\\n")
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        x = torch.linspace(-1, 1, 96).reshape(32, 3)
        samples = TensorDataset(x, x.sum(dim=1, keepdim=True).sin())
        return DataLoader(samples, batch_size=4, shuffle=True, num_workers=1)
"""
KINDS = (
    *("kill", "exception", "segfault", "terminate", "stop", "slow", "disconnect"),
    *("out_of_memory", "kill_worker", "full_disk", "corrupt_checkpoint"),
)
STRATEGIES = ("single", "ddp", "ddp_spawn", "bagua")
TOKEN = "GEARTRAIN_DRILL"
#: A word of the first cause, as the restart's line must name it.
CAUSES = {
    "kill": "SIGKILL",
    "exception": "an exception on purpose",
    "segfault": "SIGSEGV",
    "terminate": "SIGTERM",
    "stop": "stopped",
    "disconnect": "onnect",
    "out_of_memory": "allocate",
    "kill_worker": "worker",
    "full_disk": "disk full",
    "corrupt_checkpoint": "SIGKILL",
}


def processes(token: str) -> list[int]:
    """Return the processes whose environment has the token."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{TOKEN}={token}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def run(kind: str, strategy: str, show: bool) -> tuple[list[str], list[str]]:
    """Return a row of the table, and what is wrong in the cell."""
    ranks = 1 if strategy == "single" else 2
    # The rank that writes checkpoints has the full disk.
    rank = 0 if kind == "full_disk" else ranks - 1
    faults = [f"--chaos.{kind}", f"rank={rank},step=6,seconds=3"]
    if kind == "corrupt_checkpoint":
        faults = [*faults, "--chaos.kill", f"rank={rank},step=11"]
    saves = {"every_n_train_steps": "2", "save_last": "true", "save_top_k": "-1"}
    with tempfile.TemporaryDirectory(prefix="geartrain-drill-") as name:
        folder, token = Path(name), uuid.uuid4().hex
        (folder / "net.py").write_text(TARGET)
        command = [
            *(str(Path(sys.executable).with_name("geartrain")), "fit", "net.py"),
            *("--accelerator", "cpu"),
            *("--strategy", strategy, "--devices", str(ranks), "--max-epochs", "4", "-q"),
            *("--seed", "1", "--log-every-n-steps", "1", "--output", "run"),
            *("--max-restarts", "2", "--plugin", "chaos", *faults, "--plugin", "model_checkpoint"),
            *(part for k, v in saves.items() for part in (f"--model_checkpoint.{k}", v)),
        ]
        patience = {"GEARTRAIN_PATIENCE": "stopped=3", TOKEN: token}
        began = time.monotonic()
        process = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **patience},
            capture_output=True,
            text=True,
            timeout=300,
        )
        took = time.monotonic() - began
        time.sleep(0.2)
        remaining = processes(token)
        marks = {path.name: float(path.read_text()) for path in (folder / "run/chaos").glob("*")}
        fault = next((when for mark, when in marks.items() if "kill-" in mark), None)
        if kind not in ("corrupt_checkpoint", "kill"):
            fault = next((when for mark, when in marks.items() if kind in mark), None)
        lines = [line.split() for line in (folder / "steps-0").read_text().splitlines()]
        path = folder / "run" / "restarts.jsonl"
        restarts = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
        # The step of the fault may have begun on rank 0: the next begins in another process.
        following = None
        if fault is not None:
            after = [(float(when), int(step)) for when, step in lines if float(when) > fault]
            resumed = restarts[0]["resumed_at"] + 1 if restarts else 7
            following = next((when - fault for when, step in after if step == resumed), None)
        steps = [int(json.loads(line)["step"]) for line in (folder / "run/metrics.jsonl").open()]
        cause = restarts[0]["failure"] if restarts else ""
        wrong = []
        expected = 0 if kind == "slow" else 1
        if process.returncode != 0:
            wrong.append(f"exit code {process.returncode}")
        if len(restarts) != expected:
            wrong.append(f"{len(restarts)} restarts")
        if expected and CAUSES[kind] not in cause:
            wrong.append(f"the cause is {cause!r}")
        if steps != list(range(1, steps[-1] + 1)) or steps[-1] != 32 // ranks:
            wrong.append(f"steps of metrics.jsonl: {steps}")
        if remaining:
            wrong.append(f"processes are left: {remaining}")
        if fault is None:
            wrong.append("no fault has fired")
        if show or wrong:
            print(process.stdout, process.stderr, file=sys.stderr)
        outcome = "restarted" if restarts else "went on"
        seconds = "-" if following is None else f"{following:.1f}"
        named = f"rank {rank}" in cause or not restarts
        row = [kind, strategy, outcome, "yes" if named else "no", str(process.returncode)]
        return [*row, "yes" if remaining else "nothing", seconds, f"{took:.0f}"], wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    titles = ["fault", "strategy", "the run", "rank named", "exit code", "left"]
    titles += ["s to the next step", "s in all"]
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles), flush=True)
    failures = []
    for kind in given.kinds.split(","):
        for strategy in given.strategies.split(","):
            if (kind, strategy) == ("disconnect", "single"):
                continue
            row, wrong = run(kind, strategy, given.show)
            print("| " + " | ".join(row) + " |", flush=True)
            failures += [f"{kind} {strategy}: {problem}" for problem in wrong]
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
