"""From the shell to the exit: five epochs by ``geartrain fit``, a script by hand, and Lightning.

``digits``: scikit-learn's 1,797 images, a small CNN. ``table``: 20,000 rows, an MLP. ``char_lm``:
a GPT of 0.8 million parameters on 512 pieces of 64 characters. Adam, the same network and data in
each program, one thread. geartrain and Lightning write what they write by default, without a bar.
The programs alternate; medians of the wall time and of the CPU time of all their processes.

    python benchmarks/end_to_end.py [--data digits table char_lm] [--rounds 5] [--epochs 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DATA = {
    "digits": """
from sklearn.datasets import load_digits

def make_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target))

def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )
""",
    "table": """
def make_data():
    return TensorDataset(torch.randn(20_000, 64), torch.randint(0, 10, (20_000,)))

def make_net():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
""",
    "char_lm": """
def make_data():
    text = torch.randint(0, 65, (512, 65))
    return TensorDataset(text[:, :-1], text[:, 1:])

class Last(nn.Linear):
    def forward(self, x):
        return super().forward(x).transpose(1, 2)  # classes before positions

def make_net():
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(65, 128), nn.TransformerEncoder(layer, 4), Last(128, 65))
""",
}
SAMPLES = {"digits": 1797, "table": 20_000, "char_lm": 512}

SHARED = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
"""

BY_HAND = """
net = make_net()
optimizer = torch.optim.Adam(net.parameters())
loader = DataLoader(make_data(), batch_size=64, shuffle=True)
for epoch in range(int(sys.argv[1])):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
torch.save(net.state_dict(), "last.ckpt")
"""

MODULE = """
class Net(base):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def train_dataloader(self):
        return DataLoader(make_data(), batch_size=64, shuffle=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
"""

OURS = "\nimport geartrain\nbase = geartrain.Module\n" + MODULE

LIGHTNING = (
    "\nimport pytorch_lightning as pl\nbase = pl.LightningModule\n"
    + MODULE
    + """
pl.Trainer(accelerator="cpu", max_epochs=int(sys.argv[1]), enable_progress_bar=False).fit(Net())
"""
)


def programs(data: str, folder: Path, epochs: int) -> dict[str, list[str]]:
    """Write the programs, and return the commands by name."""
    for name, text in (("by_hand", BY_HAND), ("ours", OURS), ("lightning", LIGHTNING)):
        (folder / f"{name}.py").write_text(SHARED + DATA[data] + text)
    python = sys.executable
    geartrain = [str(Path(python).parent / "geartrain"), "fit", "ours.py", "--accelerator", "cpu"]
    found = {
        "by hand": [python, "by_hand.py", str(epochs)],
        "geartrain fit": [
            *geartrain,
            *("--max-epochs", str(epochs), "--enable-progress-bar", "false", "--output", "run"),
        ],
    }
    if find_spec("pytorch_lightning"):
        found["Lightning"] = [python, "lightning.py", str(epochs)]
    return found


def seconds(command: list[str]) -> tuple[float, float]:
    """Return the wall time and the CPU time from the start of a program to its exit."""
    with tempfile.TemporaryDirectory() as folder:
        for program in Path.cwd().glob("*.py"):
            (Path(folder) / program.name).write_text(program.read_text())
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(data: str, rounds: int, epochs: int) -> dict[str, Any]:
    """Return the figures of each program."""
    with tempfile.TemporaryDirectory() as folder:
        commands = programs(data, Path(folder), epochs)
        os.chdir(folder)
        each = [
            {name: seconds(command) for name, command in commands.items()} for _ in range(rounds)
        ]
        os.chdir("/")
    rows = {}
    for name in commands:
        wall, cpu = (statistics.median(one[name][which] for one in each) for which in (0, 1))
        over = statistics.median(one[name][1] / one["by hand"][1] for one in each)
        rows[name] = {
            "seconds": round(wall, 2),
            "CPU seconds": round(cpu, 2),
            "CPU over by hand": round(over, 2),
            "samples/s": round(SAMPLES[data] * epochs / wall),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    facts = {data: measure(data, options.rounds, options.epochs) for data in options.data}
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    print("| | seconds | CPU seconds | over by hand | samples/s |\n|---|---|---|---|---|")
    for data, rows in facts.items():
        for name, row in rows.items():
            print(
                f"| {data}, {name} | " + " | ".join(f"{value:,}" for value in row.values()) + " |"
            )


if __name__ == "__main__":
    main()
