"""Several processes on one node: only one of them samples."""

import pytest
from several_ranks import results

from geartrain import hookimpl
from geartrain.testing import ThreadRanks
from geartrain_monitor.device_stats import DeviceStats

from ...spawn.models import Net as SpawnedNet, loader, trainer as spawning
from .cases import FakeGpu, Logger, Net, Until, sampling, trainer


class Who:
    """Record the number of sampling threads in each step."""

    def __init__(self):
        self.sampling = set()

    @hookimpl
    def on_step_end(self):
        self.sampling.add(len(sampling()))


def train_on_a_rank():
    who, gpu, logger = Who(), FakeGpu(), Logger()
    trainer(who, gpu, logger, strategy="ddp", devices=2).fit(Net(), Until(logger.count(3)))
    assert not sampling()
    return who.sampling, gpu.asked, logger.samples


def test_only_the_first_of_two_thread_ranks_samples():
    who, logger = Who(), Logger()
    one = trainer(who, FakeGpu(), logger, strategy=ThreadRanks(2))
    one.fit(Net(), Until(logger.count(2)))
    assert who.sampling == {1}
    assert {"gpu0_memory_used_mib", "process_rss_mib"} <= logger.samples[0][2].keys()
    assert not sampling()


@pytest.mark.end_to_end
def test_only_the_first_of_two_ranks_samples(tmp_path):
    (threads, asked, samples), other = results(tmp_path, train_on_a_rank)
    assert threads == {1}
    assert asked >= len(samples) >= 3
    assert {"gpu0_memory_used_mib", "process_rss_mib"} <= samples[0][2].keys()
    assert other == ({0}, 0, [])


@pytest.mark.end_to_end  # test_plugin.py pickles the object and uses it in a second fit
def test_an_object_works_on_spawned_ranks_and_in_a_second_fit(tmp_path):
    one = spawning(plugins=[DeviceStats(1000)], output=str(tmp_path / "out"))
    module = SpawnedNet()
    for fits in (1, 2):
        one.fit(module, loader())
        lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
        assert sum("process_rss_mib" in line for line in lines) == fits
