"""horovodrun's elastic mode: workers come and go, and the run resumes from its last commit.

The weights are compared with a loop by hand.
"""

import csv
import json
import os
import signal
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from geartrain_horovod.elastic import Elastic
from geartrain_testing.launching import Launched, until

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="finds processes through /proc"
    ),
    pytest.mark.timeout(400),
]
HERE = Path(__file__).parent
#: Two names of this machine stand for two machines, because horovodrun starts no worker on a
#: machine on which another worker has failed.
ONE, BOTH = "localhost:1\n", "localhost:1\n127.0.0.1:1\n"
#: As in growing.py.
SAMPLES, BATCH, STARTED, ENDED = 32, 4, 90, 120


class Job:
    """A program under horovodrun, and the files that it wrote."""

    def __init__(self, folder, hosts, **environment):
        self.folder = folder
        self.offer(hosts)
        script = folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
        script.chmod(0o755)
        horovodrun = str(Path(sysconfig.get_path("scripts"), "horovodrun"))
        workers = f"-np {len(hosts.split())} --min-np 1 --max-np 2 --network-interfaces lo".split()
        command = [horovodrun, *workers, "--host-discovery-script", str(script)]
        # Survivors wait for a new worker, which imports torch slowly on a busy machine.
        command += ["--gloo-timeout-seconds", "90", "--elastic-timeout", "90"]
        command += [sys.executable, str(HERE / "growing.py"), str(folder)]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.program = Launched(command, folder, {"PATH": path, **environment})

    def offer(self, hosts):
        """Set the hosts that the discovery script prints, in one step."""
        new = self.folder / "hosts.new"
        new.write_text(hosts)
        new.replace(self.folder / "hosts")

    def wait_for(self, *names):
        def all_exist():
            assert self.program.process.poll() is None, self.program.out + self.program.err
            return all((self.folder / name).exists() for name in names)

        until(all_exist, STARTED, f"{names}")

    def go(self):
        (self.folder / "go").touch()

    def diaries(self):
        """Return each process's notes, by its first rank."""
        found = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in self.folder.glob("diary-*")
        ]
        return {notes[0]["rank"]: notes for notes in found}

    def end(self, rank):
        return torch.load(self.folder / f"end-{rank}.pt")


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(hosts, **environment):
        jobs.append(Job(tmp_path, hosts, **environment))
        return jobs[0]

    yield start
    for each in jobs:
        each.program.kill()


def by_hand(*stretches):
    """Return the weights after stretches of (world size, epoch, first batch, batches)."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 3, generator=random)
    y, layer = x.sum(1, keepdim=True), nn.Linear(3, 1)
    nn.init.constant_(layer.weight, 0.1)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    for size, epoch, first, batches in stretches:
        optimizer.param_groups[0]["lr"] = 0.01 * size * 0.5**epoch
        for step in range(first, first + batches):
            # One step of all ranks: together they take consecutive samples.
            these = slice(step * BATCH * size, (step + 1) * BATCH * size)
            optimizer.zero_grad()
            mse_loss(layer(x[these]), y[these]).backward()
            optimizer.step()
    return {f"layer.{name}": value for name, value in layer.state_dict().items()}


def same(weights, others):
    return all(torch.allclose(weights[name], others[name], rtol=1e-5, atol=1e-6) for name in others)


def test_a_worker_joins(job):
    job = job(ONE, HOLD="2")
    job.wait_for("held-0")
    job.offer(BOTH)
    job.wait_for("heard")
    job.go()
    job.program.succeed(ENDED)
    assert job.program.left_behind() == []
    old, new = job.diaries()[0], job.diaries()[1]
    # One rank ends the epoch alone. The next epoch has two ranks: each step has twice as many
    # samples and twice the learning rate.
    assert [note["size"] for note in old if "size" in note] == [1] * 8 + [2] * 12
    assert [note for note in old if "error" in note] == [{"error": "WorldChanged"}]
    assert [note["step"] for note in new] == list(range(9, 21))
    assert [note["epoch"] for note in new] == [1] * 4 + [2] * 4 + [3] * 4
    for note in (*old, *new):
        if "lr" in note:
            assert note["lr"] == pytest.approx(0.01 * note["size"] * 0.5 ** note["epoch"])
    ends = [job.end(rank) for rank in range(2)]
    assert [(end["step"], end["epoch"], end["size"]) for end in ends] == [(20, 4, 2)] * 2
    assert ends[0]["resumes"]
    assert ends[1]["resumes"]
    for name, value in ends[0]["weights"].items():
        assert torch.equal(value, ends[1]["weights"][name])
    assert same(ends[0]["weights"], by_hand((1, 0, 0, 8), (2, 1, 0, 4), (2, 2, 0, 4), (2, 3, 0, 4)))
    with (job.folder / "metrics.csv").open() as file:  # one table for the whole run
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 21))


def test_rank_0_is_killed(job):
    job = job(BOTH, HOLD="7", OPTIONS='{"commit_every_n_steps": 3}')
    job.wait_for("held-0", "held-1")
    os.kill(int((job.folder / "held-0").read_text()), signal.SIGKILL)
    job.go()
    job.program.succeed(ENDED)
    assert job.program.left_behind() == []
    notes = job.diaries()[1]
    # The commit is of step 6, after two batches of two ranks in the epoch. The remaining rank
    # resumes after batch four, with rank 0's metrics.
    assert [note["step"] for note in notes if "step" in note] == [*range(1, 8), *range(7, 27)]
    assert [note["error"] for note in notes if "error" in note] == ["WorldChanged"]
    assert [notes[8][name] for name in ("rank", "size", "epoch", "batch")] == [0, 1, 1, 5]
    assert all(
        note["lr"] == pytest.approx(0.01 * note["size"] * 0.5 ** note["epoch"])
        for note in notes
        if "lr" in note
    )
    end = job.end(0)
    assert (end["step"], end["epoch"], end["size"]) == (26, 4, 1)
    assert same(
        end["weights"],
        by_hand((2, 0, 0, 4), (2, 1, 0, 2), (1, 1, 4, 4), (1, 2, 0, 8), (1, 3, 0, 8)),
    )
    assert "a peer has gone" in job.program.err + job.program.out
    assert json.loads((job.folder / "run" / "summary.json").read_text())["status"] == "done"


def test_an_error_of_user_code_ends_only_its_worker(job):
    # With Horovod's optimizer: its hooks of the first world must not run in the second.
    job = job(BOTH, FAIL="5", OPTIONS='{"distributed_optimizer": true}')
    job.program.succeed(ENDED)
    assert job.program.left_behind() == []
    assert 'KeyError: "an error of the user\'s code"' in job.program.err + job.program.out
    notes = job.diaries()
    # The error has ended its worker.
    assert [note["error"] for note in notes[1] if "error" in note] == ["KeyError"]
    assert [note["error"] for note in notes[0] if "error" in note] == ["WorldChanged"]
    # horovodrun continues with the other workers, as after the death of a worker.
    assert job.end(0)["size"] == 1
    assert same(
        job.end(0)["weights"], by_hand((2, 0, 0, 4), (1, 1, 0, 8), (1, 2, 0, 8), (1, 3, 0, 8))
    )


def test_a_run_that_resumes_within_an_epoch_makes_no_commit_for_its_start():
    """The commit would have the step of the middle, but not the batches before it."""
    elastic, within = Elastic(every=None), SimpleNamespace(resumed=SimpleNamespace(batch_idx=2))
    run = SimpleNamespace(loop=within)
    elastic.commit_epoch(run, collectives=None)
    assert elastic.last is None
