"""What a process without the ranks' secret sends is refused before it is unpickled."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from several_ranks import failed, results

import geartrain as gt
from geartrain import TrainingError, hookimpl
from geartrain_parallel import rendezvous, sealed, sockets

REFUSAL = "was not sent by a rank of this run"


def test_a_message_is_read_only_with_the_secret_that_sealed_it(monkeypatch):
    monkeypatch.setenv(sealed.SECRET, "a")
    message = sealed.seal(b"text")
    assert sealed.unseal(message) == b"text"
    changed = bytes([*message[:-1], message[-1] ^ 1])
    for forged in (changed, bytes(sealed.SIZE) + b"text", b"text", b""):
        with pytest.raises(TrainingError, match=REFUSAL):
            sealed.unseal(forged)
    monkeypatch.setenv(sealed.SECRET, "b")
    with pytest.raises(TrainingError, match=REFUSAL):
        sealed.unseal(message)


def test_ranks_of_torchrun_have_no_secret(monkeypatch):
    monkeypatch.delenv(sealed.SECRET, raising=False)
    assert sealed.unseal(sealed.seal(b"text")) == b"text"


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, size):
        self.size = size

    def __reduce__(self):
        return Path.touch, (Path("harmed"), 0o666, True), {"more": b"x" * self.size}


class Net(gt.Module):
    def validation_step(self, batch, batch_idx):
        pass


def run_on_ranks(plugin):
    os.environ[sealed.SECRET] = "of the run"
    options = {"accelerator": "cpu", "devices": 2, "enable_progress_bar": False}
    trainer = gt.Trainer(strategy="ddp", plugins=[plugin], **options)
    trainer.validate(Net(), [torch.ones(1)])


def forge(size):
    class Forges:
        @hookimpl
        def on_run_start(self, run):
            if run.world.rank == 1:  # a process that rank 0 takes for rank 1
                os.environ[sealed.SECRET] = "a guess"
            run.hooks.broadcast(run=run, obj=Evil(size), src=1)

    run_on_ranks(Forges())


@pytest.mark.parametrize("size", [0, 5000])
def test_rank_0_unpickles_nothing_of_a_process_without_the_secret(tmp_path, size):
    first, _ = failed(tmp_path, forge, size)
    assert REFUSAL in first.error
    assert not (tmp_path / "harmed").exists()


def share():
    options = {"accelerator": "cpu", "devices": 2, "enable_progress_bar": False}
    fork = {"start_method": "fork"}
    trainer = gt.Trainer(strategy="ddp_spawn", strategy_options=fork, **options)
    trainer.validate(Shows(), [torch.ones(1), torch.ones(1)])
    return trainer.callback_metrics["same"].item(), sealed.SECRET in os.environ


class Shows(gt.Module):
    def validation_step(self, batch, batch_idx):
        secret = torch.tensor([ord(letter) for letter in os.environ[sealed.SECRET]])
        both = self.all_gather(secret)
        self.log("same", float(len(secret) == 64 and torch.equal(both[0], both[1])))


def test_ranks_that_geartrain_starts_on_one_node_share_a_secret(tmp_path):
    assert results(tmp_path, share, ranks=1, place="alone") == [(1.0, True)]


@pytest.fixture
def served(monkeypatch):
    """A store that another program can reach, too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv(sealed.SECRET, "of the run")
    return rendezvous.serve(sockets.bind("127.0.0.1", None), timedelta(seconds=30))


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 200])
def test_gloo_gets_nothing_that_another_program_has_written(served, data):
    other = rendezvous.connect(served.host, served.port, timedelta(seconds=30), 1)
    other.set("group/0/1", data)  # the address of rank 1; gloo crashes if it is empty
    store = rendezvous.SealedStore(served)
    with pytest.raises(TrainingError, match=REFUSAL):
        dist.ProcessGroupGloo(dist.PrefixStore("group", store), 0, 2, timedelta(seconds=30))


def test_a_value_of_the_store_is_that_of_its_key(served):
    store, other = rendezvous.SealedStore(served, "run/"), rendezvous.SealedStore(served)
    store.set("a", "text")
    assert (store.get("a"), other.get("run/a"), store.clone().multi_get(["a"])) == (
        b"text",
        b"text",
        [b"text"],
    )
    assert store.compare_set("first", "", "1") == other.get("run/first") == b"1"
    assert store.compare_set("first", "", "2") == b"1"
    assert store.compare_set("first", "1", "3") == store.get("first") == b"3"
    served.set("run/b", served.get("run/a"))
    with pytest.raises(TrainingError, match=REFUSAL):
        store.get("b")


class ReadsAll:
    """Read each value of the store, those of torch's groups, too."""

    @hookimpl
    def on_run_start(self, run):
        self.count, store = 0, run.store._store
        for key in store.list_keys():
            self.count += len(sealed.unseal(store.get(key), key)) > 0


def read_all(strategy):
    os.environ[sealed.SECRET] = "of the run"
    options = {"accelerator": "cpu", "devices": 2, "enable_progress_bar": False}
    plugin = ReadsAll()
    trainer = gt.Trainer(strategy=strategy, plugins=[plugin], **options)
    trainer.validate(Net(), [torch.ones(1)])
    return plugin.count


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "bagua"])
def test_all_values_in_the_store_of_a_run_are_sealed(tmp_path, strategy):
    assert min(results(tmp_path, read_all, strategy)) >= 4
