"""Several processes on one node: one of them samples."""

from pathlib import Path

import torch

from geartrain.testing.launching import launched
from geartrain_device_stats import DeviceStats

from ..spawn.models import Net, loader
from ..spawn.models import trainer as spawning

SCRIPT = f"""
import sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from device_stats.cases import *


class Who:
    def __init__(self):
        self.sampling = set()

    @hookimpl
    def on_step_end(self):
        self.sampling.add(len(sampling()))


who, gpu, logger = Who(), FakeGpu(), Logger()
one = trainer(who, gpu, logger, strategy="ddp", devices=2)
one.fit(Net(), Until(logger.count(3)))
assert not sampling()
torch.save((who.sampling, gpu.asked, logger.samples), f"kept-{{one.global_rank}}.pt")
"""


def test_of_two_ranks_the_first_samples(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with launched("train.py", folder=tmp_path) as run:
        run.succeed(60)
        assert not run.left_behind()
    (sampling, asked, samples), other = (torch.load(tmp_path / f"kept-{rank}.pt") for rank in range(2))
    assert sampling == {1}
    assert asked >= len(samples) >= 3
    assert {"gpu0_memory_used_mib", "process_rss_mib"} <= samples[0][2].keys()
    assert other == ({0}, 0, [])


def test_an_object_goes_to_spawned_ranks_and_serves_a_second_fit(tmp_path):
    one = spawning(plugins=[DeviceStats(1000)], output=str(tmp_path / "out"))
    module = Net()
    for fits in (1, 2):
        one.fit(module, loader())
        lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
        assert sum("process_rss_mib" in line for line in lines) == fits
