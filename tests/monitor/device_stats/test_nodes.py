"""Samples of several nodes reach rank 0 through the run's store."""

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from several_ranks import succeeded
from small_models import Pretend
from torch.distributed import DistError, TCPStore

import geartrain as gt
from geartrain import hookimpl
from geartrain_monitor.device_stats.nodes import Nodes

from .cases import FakeGpu, Logger, Net, Until, sampling, trainer


def train_on_a_node():
    node, logger = int(os.environ["NODE_RANK"]), Logger()
    gpu = FakeGpu(gpu0_power_watt=100 + node)
    one = trainer(logger, gpu, strategy="ddp", devices=1, num_nodes=2)

    def has_both():
        return any("node1_cpu_utilization_percent" in figures for _, _, figures in logger.samples)

    one.fit(Net(), Until(has_both))
    assert not sampling()
    return logger.samples, one.global_rank


def store(port=0, is_server=True):
    options = {"timeout": timedelta(seconds=10), "wait_for_workers": False}
    return TCPStore("127.0.0.1", port, None, is_server, **options)


@pytest.fixture
def server():
    return store()


def node(server, rank, count=3):
    plan, world = SimpleNamespace(num_nodes=count), gt.World(rank, count, 0, 1, rank)
    end = Nodes(SimpleNamespace(plan=plan, store=server, world=world))
    end.connect()
    return end


def test_rank_0_gets_the_newest_values_of_every_node(server):
    first, third = node(server, 0), node(server, 2)
    assert first.exchange({"a": 1.0}) == {"node0_a": 1.0}
    for value in (2.0, 3.0):
        assert third.exchange({"a": value}) == {}
    assert first.exchange({"a": 4.0}) == {"node0_a": 4.0, "node2_a": 3.0}


def test_no_node_waits_for_a_connection_that_another_client_blocks(server):
    """A process group that waits for a rank blocks its connection to the store meanwhile."""
    client = store(server.port, is_server=False)
    waiting = threading.Thread(target=client.wait, args=(["come"],), daemon=True)
    first, second = node(client, 0, 2), node(client, 1, 2)
    waiting.start()
    second.exchange({"a": 1.0})
    assert first.exchange({"a": 2.0}) == {"node0_a": 2.0, "node1_a": 1.0}
    assert waiting.is_alive()
    server.set("come", "1")
    waiting.join(30)


def test_a_store_that_no_longer_exists_is_an_error():
    server = store()
    first = node(server, 0)
    first._run.store = None
    del server
    with pytest.raises((DistError, RuntimeError)):
        first.exchange({"a": 1.0})


def test_one_node_has_no_prefix_and_needs_no_store():
    assert node(None, 0, count=1).exchange({"a": 1.0}) == {"a": 1.0}


@pytest.mark.end_to_end  # test_values_of_another_node_are_in_rank_0s_log needs no processes
def test_two_nodes_are_in_rank_0s_log(tmp_path):
    first, second = succeeded(tmp_path, train_on_a_node, place="node")
    (samples, rank), (others, other) = first.result, second.result
    assert (rank, other, others) == (0, 1, [])
    last = samples[-1][2]
    assert (last["node0_gpu0_power_watt"], last["node1_gpu0_power_watt"]) == (100.0, 101.0)
    assert last["node0_process_rss_mib"] != last["node1_process_rss_mib"]
    names = {name for _, _, figures in samples for name in figures}
    assert all(name.startswith(("node0_", "node1_")) for name in names)
    assert "device_stats: " not in first.printed + second.printed, "nothing to complain of"


class Elsewhere(Pretend):
    """A strategy of another launcher; this process is alone on its node."""

    planned = gt.Layout(None, 1)

    def __init__(self, rank, store=None):
        self.rank, self.store = rank, store

    @hookimpl
    def setup_process_group(self, run):
        run.store = self.store
        return gt.World(self.rank, 1, 0, 1, self.rank)

    @hookimpl
    def log_sync(self, values):
        return values[None]


def test_values_of_another_node_are_in_rank_0s_log(server):
    node(server, 1, 2).exchange({"power_watt": 7.0})
    logger, strategy = Logger(), Elsewhere(0, server)
    trainer(logger, FakeGpu(), strategy=strategy, num_nodes=2).fit(Net(), [torch.ones(2)])
    figures = logger.samples[0][2]
    assert figures["node1_power_watt"] == 7.0
    assert all(name.startswith(("node0_", "node1_")) for name in figures)


def test_without_a_store_only_node_0_is_logged_with_a_warning():
    logger = Logger()
    message = "Elsewhere has no store that every rank reaches, so only node 0's figures are logged"
    with pytest.warns(UserWarning, match=message):
        trainer(logger, FakeGpu(), strategy=Elsewhere(0), num_nodes=2).fit(Net(), [torch.ones(2)])
    assert logger.samples[0][2]["node0_gpu0_memory_used_mib"] == 1024.0


def test_without_a_store_another_node_does_not_sample():
    gpu, seen = FakeGpu(), []
    watched = Until(lambda: seen.extend(sampling()) or True)
    trainer(Logger(), gpu, strategy=Elsewhere(1), num_nodes=2).fit(Net(), watched)
    assert not seen
    assert gpu.asked == 0
