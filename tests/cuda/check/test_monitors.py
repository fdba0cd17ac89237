"""Figures of a run beside those of other sources."""

import gzip
import json
import os
import time

import psutil
import pytest
import torch

from geartrain import hookimpl

from .device import DEVICE, ON_DEVICE, Net, fit, loader, trainer

pytestmark = ON_DEVICE


def metrics(folder, name):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_profile_measures_the_parts_and_traces_the_device(tmp_path):
    fit(plugins=["profile"], max_epochs=4, output=tmp_path)
    profile = json.loads((tmp_path / "profile.json").read_text())
    shares = {part["name"]: part["share"] for part in profile["parts"]}
    assert {"data", "forward", "backward", "optimizer"} <= shares.keys()
    assert sum(shares.values()) == pytest.approx(1, abs=0.05)
    with gzip.open(tmp_path / "trace.json.gz", "rt") as trace:
        kinds = {event.get("cat") for event in json.load(trace)["traceEvents"]}
    assert ("kernel" if DEVICE == "cuda" else "cpu_op") in kinds


class Waits(Net):
    """Each step takes at least 20 ms on the device; the CPU does not wait for a GPU."""

    def training_step(self, batch, batch_idx):
        if DEVICE == "cuda":
            torch.cuda._sleep(40_000_000)  # cycles, at most 2 GHz
        else:
            time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def test_throughput_counts_the_time_of_the_device(tmp_path):
    fit(Waits(), plugins=["throughput"], max_epochs=6, log_every_n_steps=1, output=tmp_path)
    speeds = metrics(tmp_path, "device/samples_per_sec")
    assert speeds
    assert 8 / 0.5 < speeds[-1] <= 8 / 0.02


class Holds(Net):
    """Holds 512 MiB while it trains, and looks at the memory at the end of the epoch."""

    def on_train_start(self):
        self.kept = torch.ones(2**27, device=self.device)

    def on_train_epoch_end(self):
        self.seen = used_mib()


def used_mib():
    """Return the used memory: of the GPU, as NVML says, or of this process."""
    if DEVICE == "cpu":
        return psutil.Process(os.getpid()).memory_info().rss / 2**20
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        version = getattr(pynvml, "nvmlMemory_v2", None)
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version).used / 2**20
    finally:
        pynvml.nvmlShutdown()


def test_device_stats_beside_those_of_the_system(tmp_path):
    net = Holds()
    fit(net, max_epochs=1, plugins=["device_stats"], output=tmp_path)
    name = "gpu0_memory_used_mib" if DEVICE == "cuda" else "process_rss_mib"
    figures = metrics(tmp_path, name)
    assert figures
    assert figures[-1] == pytest.approx(net.seen, rel=0.1)
    assert figures[-1] > 512


class CountsWaits:
    """Counts the operations of a step that make the CPU wait for the GPU."""

    @hookimpl(wrapper=True)
    def step(self, run):
        if DEVICE == "cuda" and run.step >= 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_step_does_not_wait_for_the_device(precision):
    one = trainer(plugins=[CountsWaits()], precision=precision, log_every_n_steps=1000)
    one.fit(Net(), loader())
    assert one.global_step == 16
