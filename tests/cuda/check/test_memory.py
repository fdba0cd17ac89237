"""Memory: a real out-of-memory error, and explain's prediction beside the measured peak."""

import gc
import json
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain.tuning import Tuner

from .device import DEVICE, ON_DEVICE, run, trainer

pytestmark = ON_DEVICE

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
#: Of benchmarks/estimates.py, which measures all of its models on the CPU, in minutes.
MODELS = ["MLP", "CNN", "GPT", "GCN"] if DEVICE == "cuda" else ["MLP", "GPT"]
MIB = 2**20


class Wide(gt.Module):
    """A step needs about 128 MiB for each sample."""

    def __init__(self, batch_size=2):
        super().__init__()
        self.batch_size = batch_size
        self.weight = torch.nn.Parameter(torch.ones(2**24))

    def training_step(self, batch, batch_idx):
        return (batch[0] * self.weight).square().mean()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4096, 1)), batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@contextmanager
def limited():
    """On the CPU, limit the memory of this process to 2 GiB more; a GPU has its own limit."""
    if DEVICE == "cuda":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_the_batch_size_finder_meets_the_end_of_the_memory_and_comes_back():
    net = Wide()
    allocated = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    one = trainer(max_steps=2, max_epochs=-1)
    with limited():
        tuner = Tuner(one)
        size = tuner.scale_batch_size(net, steps_per_trial=1)
        assert not tuner.trials[-1].ran
        assert "allocate" in tuner.trials[-1].error
        assert size == net.batch_size == tuner.trials[-1].batch_size // 2
        gc.collect()
        if DEVICE == "cuda":
            assert torch.cuda.memory_allocated() - allocated < 100 * MIB
        one.fit(net)  # the largest batch that ran
    assert one.global_step == 2


def explained(model):
    """Return the predicted peak in bytes."""
    printed = run(
        *("geartrain", "explain", f"{BENCHMARKS / 'estimates.py'}:{model}", "--memory", "--json"),
        *("--accelerator", DEVICE, "--strategy", "single", "--devices", "1"),
    )
    return json.loads(printed[printed.index("{") :])["memory"]["peak"]


def measured(model):
    """Return the peak of a training, in bytes above those of a small model of the same class."""
    if DEVICE == "cpu":  # resident memory, of a process of its own
        variables = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        printed = run(BENCHMARKS / "estimates.py", "--measure", model, "single", **variables)
        return json.loads(printed.rpartition("MEASURED ")[2].splitlines()[0])[0][0] * MIB
    estimates = sys.modules.get("estimates") or __import__("estimates")
    cls = getattr(estimates, model)
    trainer(max_epochs=1).fit(cls(0.05))  # allocates the workspaces of libraries
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer(max_epochs=1).fit(cls())
    return torch.cuda.max_memory_allocated() - before


def test_explain_predicts_the_peak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with ThreadPoolExecutor(2) as pool:
        predicted = dict(zip(MODELS, pool.map(explained, MODELS), strict=True))
    ratios = {model: predicted[model] / measured(model) for model in MODELS}
    print(json.dumps({model: round(ratio, 3) for model, ratio in ratios.items()}))
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), ratios
