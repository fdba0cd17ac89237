"""Trainings that run until a condition is true, and values of simulated GPUs."""

import threading
import time

import small_models
import torch
from torch import nn

import geartrain as gt
from geartrain import hookimpl

DEADLINE = 30
CPU = {"cpu_utilization_percent", "process_cpu_percent", "process_rss_mib"}
CPU |= {"memory_used_percent", "memory_available_mib", "load_1m"}


class Net(gt.Module):
    """A model with one weight; every batch changes it by its mean."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.mean().item())
        loss = (self.w * batch).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", batch.mean())

    def test_step(self, batch, batch_idx):
        self.log("tested", batch.mean())

    def predict_step(self, batch, batch_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Until:
    """Yield batches until ``done()`` is true; raise after a deadline."""

    def __init__(self, done):
        self.done = done

    def __iter__(self):
        deadline = time.monotonic() + DEADLINE
        yield torch.ones(2)
        while not self.done():
            assert time.monotonic() < deadline, f"not within {DEADLINE} s"
            yield torch.ones(2)


class Logger:
    """A logger that keeps ``(stage, step, figures)`` and the calling threads."""

    def __init__(self):
        self.samples, self.threads = [], set()

    def count(self, n, stage=None):
        """True if ``n`` samples have arrived (in this stage)."""
        return lambda: sum(stage in (None, of) for of, _, _ in self.samples) >= n

    @hookimpl
    def log_metrics(self, run, metrics, step):
        if any(name.endswith("process_rss_mib") for name in metrics):
            self.samples.append((run.stage, step, dict(metrics)))
            self.threads.add(threading.current_thread())


class FakeGpu:
    """Return the values of an accelerator with one GPU."""

    def __init__(self, **figures):
        self.figures = figures or {"gpu0_utilization_percent": 87, "gpu0_memory_used_mib": 1024.0}
        self.asked, self.threads = 0, set()

    @hookimpl
    def device_stats(self, run):
        self.asked += 1
        self.threads.add(threading.current_thread().name)
        return self.figures


class Chip(FakeGpu):
    """An accelerator that reports values."""

    priority = -1

    @staticmethod
    def unavailable():
        return None

    @staticmethod
    def device_count():
        return 1


def trainer(*plugins, interval=0.1, **options):
    """Return a trainer: one epoch on the CPU with the installed plugin, no progress bar."""
    options["plugin_options"] = {"device_stats": {"interval": interval}}
    return small_models.trainer(plugins=["device_stats", *plugins], **options)


def sampling():
    """Return the plugin's live threads in this process."""
    return [thread for thread in threading.enumerate() if thread.name == "device_stats"]
