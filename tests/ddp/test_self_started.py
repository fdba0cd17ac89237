"""Programs whose ranks geartrain starts by running the program again: Trainer and Session.

tests/core/ranks and tests/session/test_on_ranks.py have the results of runs on ranks.
"""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from several_ranks import program, program_results
from torch.nn import functional
from torch.utils.data import DataLoader

from geartrain.strategies import DDPStrategy

from . import session_cases
from .cases import Net, one_trainer, samples
from .test_session import ddp_session, fail, train_without_with


class Mine(DDPStrategy):
    def __init__(self):
        super().__init__()
        self.calls = []

    def init_dist_connection(self, run):
        self.calls.append("init_dist_connection")
        super().init_dist_connection(run)

    def configure_ddp(self, run, model):
        self.calls.append("configure_ddp")
        return super().configure_ddp(run, model)


def fit_twice():
    """Fit twice with a subclass of the strategy; return the calls of its methods in each fit."""
    strategy, calls = Mine(), []
    trainer = one_trainer(strategy=strategy, devices=2)
    for _ in range(2):
        trainer.fit(Net(), DataLoader(samples(), batch_size=4))
        calls.append(list(strategy.calls))
        strategy.calls.clear()
    return {"calls": calls, "world size": trainer.world_size, "in a group": dist.is_initialized()}


def use_a_session():
    found = {}
    with ddp_session(output="out", seed=5) as session:
        session.launch()
        rank = session.global_rank
        found["place"] = (rank, session.local_rank, session.world_size, session.is_global_zero)
        session.print("printed by", rank)
        net = Net(norm=True)
        model, optimizer = session.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
        for x, y in session.setup_dataloaders(DataLoader(samples(), 4)):
            session.backward(functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:  # only on rank 0: DDP would broadcast buffers, but evaluation must not wait
            model.eval()
            with torch.no_grad():
                found["alone"] = model(samples()[:4][0]).shape
        session.log("mean", rank, sync_dist=True)
        found["metrics"] = dict(session.run.metrics)
    found["in a group"] = dist.is_initialized()
    found["usable"] = model(samples()[:4][0]).shape
    return found


def work(session, name, scale=1):
    return session.all_gather(
        torch.tensor(float(session.global_rank + 1) * scale)
    ), session_cases.loop(session, name)


def launch_functions():
    session = ddp_session()
    gathered, trained = session.launch(work, "sgd", scale=2)
    again, _ = session.launch(work, "sgd")
    return {"gathered": gathered, "again": again, "trained": trained}


def run_everything():
    """Run all cases. The first run gets the logs. The program's end closes the last session."""
    return use_a_session(), fit_twice(), launch_functions(), train_without_with()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Return the folder, and each rank's results."""
    folder = tmp_path_factory.mktemp("everything")
    return folder, program_results(folder, run_everything)


def test_an_overridden_method_is_called_once_per_process_and_run(everything):
    for _, found, _, _ in everything[1]:
        assert found["calls"] == [["init_dist_connection", "configure_ddp"]] * 2
        assert found["world size"] == 2
        assert not found["in a group"]


def test_a_session_logs_and_leaves_its_group(everything):
    folder, ranks = everything
    first, second = (rank[0] for rank in ranks)
    assert first["place"] == (0, 0, 2, True)
    assert second["place"] == (1, 1, 2, False)
    assert first["alone"] == (4, 1)
    for found in (first, second):
        assert found["metrics"] == {"mean": 0.5}
        assert not found["in a group"]
        assert found["usable"] == (4, 1)
    (line,) = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert '"step": 6' in line
    assert "printed by 0" in (folder / "run.out").read_text()
    assert "printed by 1" not in (folder / "out" / "logs" / "rank-1.log").read_text()


def test_a_launched_function_runs_on_both_ranks(everything):
    for _, _, found, _ in everything[1]:
        assert found["gathered"].tolist() == [2, 4]
        assert found["again"].tolist() == [1, 2]
        for key, value in session_cases.by_hand("sgd").items():
            torch.testing.assert_close(found["trained"][key], value, rtol=1e-5, atol=1e-6)


def test_a_session_that_is_left_open_has_trained(everything):
    assert [steps for _, _, _, steps in everything[1]] == [6, 6]


@pytest.mark.end_to_end
def test_an_error_on_another_rank_ends_all_and_is_named(tmp_path):
    with program(tmp_path, fail, "the other one", 1) as run:
        assert run.wait() != 0
        assert "rank 1 failed: ValueError: the other one" in run.err


def be_killed():
    with ddp_session() as session:
        session.launch()
        if session.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        session.barrier()


@pytest.mark.end_to_end
def test_a_rank_that_is_killed_ends_all(tmp_path):
    with program(tmp_path, be_killed) as run:
        assert run.wait() != 0
        assert "rank 1 was ended by SIGKILL" in run.err
