"""ddp under torchrun, started by hand, and on two hosts, which are connected network namespaces."""

import json
import os
import runpy
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from several_ranks import failed, results
from torch.utils.data import DataLoader
from two_hosts import two_hosts

from geartrain_testing.launching import free_port, launched, until

from .cases import Net, ddp, samples

HERE = Path(__file__).parent

FAULT = str(HERE / "fault.py")
NO_FAULT = ("none", "0", "train")


def torchrun(*arguments: str, **options):
    """Start two ranks of a program under torchrun."""
    return launched(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        *arguments,
        **options,
    )


def elastic_node(folder: Path, name: str, port: int):
    """Start a node of a run that nodes may leave and join, under torchrun."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    conf = ("--rdzv-conf", "last_call_timeout=1", "--max-restarts", "9")
    saves = ("--plugin", "model_checkpoint", "--model_checkpoint.every_n_train_steps", "2")
    return launched(
        *("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
        *(*rendezvous, *conf, str(HERE / "elastic.py"), "fit", "--strategy", "ddp", "--seed", "1"),
        *("--max-epochs", "2", "--output", "out", "--resume", "auto", *saves),
        *("--model_checkpoint.save_last", "true"),
        folder=folder,
        name=name,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def weights(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "last.ckpt", weights_only=True)["model"]
    return torch.cat([state[name].flatten() for name in sorted(state)])


def train_without_a_fault():
    """Run the program without a fault, in a rank."""
    sys.argv, os.environ["OUTPUT"] = [FAULT, *NO_FAULT], "out"
    runpy.run_path(FAULT, run_name="__main__")


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> torch.Tensor:
    """Return the weights of two ranks that the rank server forked."""
    folder = tmp_path_factory.mktemp("forked")
    results(folder, train_without_a_fault)
    return weights(folder / "out")


@pytest.mark.end_to_end
def test_joins_torchrun_and_trains_the_same(tmp_path, expected):
    with torchrun(FAULT, *NO_FAULT, folder=tmp_path, OUTPUT="out") as run:
        until((tmp_path / "marks" / "training-1").exists, 60, "training")
        assert len(run.processes()) <= 3  # torchrun and its two ranks
        run.succeed()
    assert {(tmp_path / "marks" / f"done-{rank}").exists() for rank in range(2)} == {True}
    assert not (tmp_path / "out" / "logs").exists()
    assert torch.equal(weights(tmp_path / "out"), expected)


class Fails(Net):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        raise KeyError(self.error)


def survive_and_train():
    """Fail, catch the error and start a second run. The launcher reads errors from a file."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"error-{os.environ['RANK']}.json"
    try:
        ddp().fit(Fails("survived"), DataLoader(samples()))
    except KeyError:
        ddp().fit(Fails("too late"), DataLoader(samples()))


CLOSED = (
    "cannot begin a run: the connection through which ranks meet is closed, "
    "as after a run that failed"
)


def test_the_launcher_gets_the_refusal_of_a_second_run_not_the_caught_error(
    tmp_path,
):
    for number, rank in enumerate(failed(tmp_path, survive_and_train)):
        assert CLOSED in rank.error
        file = tmp_path / f"error-{number}.json"
        message = json.loads(file.read_text())["message"]["message"]
        assert CLOSED in message.splitlines()[0]


@pytest.mark.end_to_end
def test_torchrun_shows_the_error_of_the_rank_that_raised(tmp_path):
    with torchrun(FAULT, "exception", "1", "train", folder=tmp_path) as run:
        assert run.wait() != 0
        root_cause = run.err.partition("Root Cause")[2]
        assert "rank      : 1" in root_cause
        assert "my own error" in root_cause


def fit_as(environment, num_nodes):
    """Train as one rank of two; the other never starts."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(environment)
    trainer = ddp(devices=2 // num_nodes, num_nodes=num_nodes, strategy_options={"timeout": 1.0})
    trainer.fit(Net(), DataLoader(samples(), batch_size=4))


ABSENT = {0: "rank 1 reached no rank 0", 1: "ranks [1] of 2 did not come"}


@pytest.mark.parametrize(("nodes", "absent"), [(1, 0), (2, 1)])
def test_an_absent_rank_or_node_is_named(tmp_path, nodes, absent):
    number = str(1 - absent)
    of_rank = {"WORLD_SIZE": "2", "RANK": number, "LOCAL_RANK": number}
    place = of_rank if nodes == 1 else {"NODE_RANK": number}
    (rank,) = failed(tmp_path, fit_as, place, nodes, ranks=1)
    assert ABSENT[absent] in rank.error


@pytest.mark.parametrize(("address", "node"), [("nowhere.invalid", "0"), ("192.0.2.1", "1")])
def test_a_wrong_master_address_is_named(tmp_path, address, node):
    (rank,) = failed(tmp_path, fit_as, {"NODE_RANK": node, "MASTER_ADDR": address}, 2, ranks=1)
    assert address in rank.error
    assert "MASTER_ADDR" in rank.error


# --- two hosts -----------------------------------------------------------------------------------


@pytest.fixture
def hosts():
    """Two network namespaces, 10.99.0.1 and 10.99.0.2."""
    with two_hosts("10.99.0") as names:
        yield names


def on(host: str) -> dict:
    return {"before": ("ip", "netns", "exec", host)}


def node(stack: ExitStack, hosts: list[str], folder: Path, i: int, *fault: str, **environment: str):
    """Start one node's program in a separate folder: hosts share no disk."""
    path = folder / f"node-{i}"
    path.mkdir()
    address = {
        "NODE_RANK": str(i),
        "MASTER_ADDR": "10.99.0.1",
        "MASTER_PORT": "29511",
        "NODES": "2",
        "OUTPUT": "out",
    }
    return stack.enter_context(
        launched(
            FAULT, *(fault or NO_FAULT), folder=path, **on(hosts[i]), **{**address, **environment}
        )
    )


@pytest.mark.end_to_end  # by default: tests/dp/test_ddp2.py and tests/spawn/test_sessions.py
def test_two_hosts_train_together(tmp_path, hosts):
    with ExitStack() as stack:
        for run in [node(stack, hosts, tmp_path, i) for i in range(2)]:
            run.succeed(100)
    done = {
        path.name for i in range(2) for path in (tmp_path / f"node-{i}" / "marks").glob("done-*")
    }
    assert done == {"done-0", "done-1", "done-2", "done-3"}
    assert (tmp_path / "node-0" / "out" / "logs" / "rank-1.log").exists()
    assert (tmp_path / "node-1" / "out" / "logs" / "rank-3.log").exists()
    # Every rank writes its weights, which must be equal.
    sums = {
        path.read_text()
        for i in range(2)
        for path in (tmp_path / f"node-{i}" / "marks").glob("weights-*")
    }
    assert len(sums) == 1


@pytest.mark.end_to_end
def test_an_error_on_the_other_host_ends_both(tmp_path, hosts):
    with ExitStack() as stack:
        runs = [node(stack, hosts, tmp_path, i, "exception", "3", "validation") for i in range(2)]
        assert [run.wait(100) != 0 for run in runs] == [True, True]
        assert "rank 3 failed: KeyError: 'my own error'" in runs[1].err


@pytest.mark.end_to_end  # by default: tests/parallel/test_rendezvous.py and test_sharding.py
@pytest.mark.timeout(400)
def test_nodes_leave_and_join_and_each_sample_comes_once(tmp_path):
    def steps():
        """Return time, world, epoch, step and samples of each rank's steps, in order of time."""
        files = tmp_path.glob("steps-*")
        return sorted(json.loads(line) for file in files for line in file.read_text().splitlines())

    def trains_with(size):
        done = len(steps())
        until(lambda: [s for s in steps()[done:] if s[1] == size][5:], 90, f"{size} nodes train")

    port = free_port()
    with elastic_node(tmp_path, "first", port) as first:
        until(lambda: not is_free(port), 60, "the first node serves the rendezvous")
        with elastic_node(tmp_path, "second", port):
            trains_with(2)
        trains_with(1)
        with elastic_node(tmp_path, "third", port) as third:
            trains_with(2)
            (tmp_path / "fast").touch()
            for each in (first, third):
                each.succeed(120)
    by_step = {}
    for _, size, epoch, step, numbers in steps():
        by_step.setdefault((epoch, step), []).append((size, numbers))
    for epoch in (0, 1):
        # A step that was done again counts as it was done last.
        last = [rows[-rows[-1][0] :] for (number, _), rows in by_step.items() if number == epoch]
        samples = [number for rows in last for _, numbers in rows for number in numbers]
        assert sorted(samples) == list(range(120))
