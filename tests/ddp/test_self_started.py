"""Programs whose ranks geartrain starts by running the program again: Trainer and Session."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from several_ranks import program, program_results
from torch.nn import functional
from torch.utils.data import DataLoader

from geartrain.strategies import DDPStrategy

from . import session_cases
from .cases import Net, ddp, one_trainer, samples, weights
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


class Watched(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def on_validation_epoch_start(self):
        self.seen.append({key: value.clone() for key, value in self.named_buffers()})


def fit_validate_and_test():
    """Run fit with BatchNorm, validate, test, fit again, and a user-defined strategy."""
    found = {}
    module = Watched(norm=True)
    if int(os.environ.get("RANK", 0)):
        module.first.reset_parameters()  # ranks start with different weights
    val = DataLoader(samples(24), batch_size=3)
    trainer = ddp(max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module, DataLoader(samples(), batch_size=4), val)
    found["buffers"] = {key: value.clone() for key, value in module.named_buffers()}
    found["buffers in validation"] = list(module.seen)
    found["after one"] = weights(module)
    found["fit's own validation"] = trainer.run.metrics["val_loss"]
    found["validated"] = trainer.validate(module, val)
    found["tested"] = trainer.test(module, val)
    trainer.fit(module, DataLoader(samples(), batch_size=4), val)
    found["after two"] = weights(module)
    found["counters"] = (trainer.global_step, trainer.current_epoch, trainer.world_size)

    own = Mine()
    mine = one_trainer(strategy=own, devices=2)
    mine.fit(Net(), DataLoader(samples(), batch_size=4))
    found["calls"] = list(own.calls)
    mine.fit(Net(), DataLoader(samples(), batch_size=4))
    found["calls of two"] = list(own.calls)

    other = Net()
    other.last.reset_parameters()
    # Different weights on each rank, and no training that would make them equal.
    with torch.random.fork_rng():
        torch.manual_seed(trainer.global_rank)
        other.last.reset_parameters()
        other.register_buffer("mask", torch.rand(3), persistent=False)
    found["of other weights"] = ddp().validate(other, val)
    found["other weights"] = other.last.weight.detach().clone()
    found["other mask"] = other.mask
    found["group is left"] = dist.is_initialized()
    return found


def use_everything():
    """Use all other features in one session."""
    session = ddp_session(output="out", seed=5)
    found = {}
    with session:
        session.launch()
        rank = session.global_rank
        found["place"] = (
            rank,
            session.local_rank,
            session.world_size,
            session.is_global_zero,
            str(session.device),
        )
        found["gathered"] = session.all_gather({"x": torch.full((2,), float(rank))})["x"]
        found["uneven"] = session.all_gather(torch.ones(rank + 1))
        found["reduced"] = {
            op: session.all_reduce(torch.tensor([rank, 10.0]), op)
            for op in ("mean", "sum", "min", "max")
        }
        found["whole mean"] = session.all_reduce(torch.tensor(rank))
        found["broadcast"] = session.broadcast({"from": rank}, src=1)
        with session.rank_zero_first():
            if rank == 0:
                Path("first").touch()
            found["first exists"] = Path("first").exists()
        session.print("printed by", rank)
        net = Net(norm=True)
        model, optimizer = session.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
        found["drawn before"] = torch.rand(1)
        with torch.no_grad():
            model(samples()[:4][0])  # the first batch
        found["drawn"] = torch.rand(1)
        loader = session.setup_dataloaders(DataLoader(samples(25), 4, shuffle=True))
        found["passes"] = [torch.cat([x[:, 0] for x, _ in loader]) for _ in range(2)]
        even = session.setup_dataloaders(DataLoader(samples(25), 4), even=False)
        none = session.setup_dataloaders(DataLoader(samples(1), 4), even=False)
        found["samples"] = (
            sum(len(x) for x, _ in even),
            len(even),
            sum(len(x) for x, _ in none),
            len(none),
        )
        for x, y in session.setup_dataloaders(DataLoader(samples(), 4)):
            session.backward(functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:  # only on rank 0: DDP would broadcast buffers, but evaluation must not wait
            model.eval()
            with torch.no_grad():
                found["alone"] = model(samples()[:4][0]).shape
        session.log("rank", rank)
        session.log("mean", rank, sync_dist=True)
        found["metrics"] = dict(session.run.metrics)
        session.save(
            "state.ckpt", {"model": model, "optimizer": optimizer, "step": session.global_step}
        )
        other, theirs = session.setup(Net(norm=True)), session.broadcast(model.state_dict())
        found["rest"] = session.load("state.ckpt", {"model": other})["step"]
        found["loaded"] = all(
            torch.equal(value, theirs[name]) for name, value in other.state_dict().items()
        )
    found["group is left"] = dist.is_initialized()
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
    return use_everything(), fit_validate_and_test(), launch_functions(), train_without_with()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Return the folder, and each rank's results."""
    folder = tmp_path_factory.mktemp("everything")
    return folder, program_results(folder, run_everything)


# --- Trainer -------------------------------------------------------------------------------------


@pytest.fixture
def one_script(everything):
    return [rank[1] for rank in everything[1]]


def test_batch_norm_buffers_end_equal_on_every_rank(one_script):
    first, second = one_script
    assert first["buffers"]["norm.num_batches_tracked"] == 12
    for key, value in first["buffers"].items():
        assert torch.equal(value, second["buffers"][key]), key


def test_batch_norm_buffers_are_equal_in_every_validation(one_script):
    first, second = (kept["buffers in validation"] for kept in one_script)
    assert len(first) == len(second) == 3  # the sanity check and two epochs
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_ranks_that_start_apart_end_with_the_same_weights(one_script):
    first, second = one_script
    for after in ("after one", "after two"):
        assert all(torch.equal(first[after][key], second[after][key]) for key in first[after])
    assert not torch.equal(first["after one"]["last.weight"], first["after two"]["last.weight"])


def test_fit_validate_test_and_fit_again_in_one_script(one_script):
    for kept in one_script:
        assert kept["validated"][0]["samples"] == 24
        assert kept["validated"][0]["val_loss"] == pytest.approx(
            kept["fit's own validation"], rel=1e-6
        )
        assert kept["tested"][0]["test_loss"] == pytest.approx(
            kept["fit's own validation"], rel=1e-6
        )
        assert kept["counters"] == (12, 2, 2)
        assert not kept["group is left"]


def test_an_overridden_hook_is_called_once_per_process_and_run(one_script):
    for kept in one_script:
        assert kept["calls"] == ["init_dist_connection", "configure_ddp"]
        assert kept["calls of two"] == kept["calls"] * 2


def test_evaluation_without_training_has_rank_0s_weights_everywhere(one_script):
    first, second = one_script
    assert torch.equal(first["other weights"], second["other weights"])
    assert torch.equal(first["other mask"], second["other mask"])
    assert first["of other weights"] == second["of other weights"]


# --- Session -------------------------------------------------------------------------------------


@pytest.fixture
def one_session(everything):
    folder, ranks = everything
    return [rank[0] for rank in ranks], folder


def test_each_rank_has_its_rank_properties(one_session):
    (first, second), _ = one_session
    assert first["place"] == (0, 0, 2, True, "cpu")
    assert second["place"] == (1, 1, 2, False, "cpu")


def test_collectives(one_session):
    for kept in one_session[0]:
        assert kept["gathered"].tolist() == [[0, 0], [1, 1]]
        assert [t.tolist() for t in kept["uneven"]] == [[1], [1, 1]]
        assert {op: t.tolist() for op, t in kept["reduced"].items()} == {
            "mean": [0.5, 10],
            "sum": [1, 20],
            "min": [0, 10],
            "max": [1, 10],
        }
        assert kept["whole mean"].item() == 0.5
        assert kept["broadcast"] == {"from": 1}
        assert kept["first exists"]
        assert kept["usable"] == (4, 1)
        assert not kept["group is left"]


def test_loaders_are_sharded_and_shuffled_again(one_session):
    (first, second), _ = one_session
    every = sorted(x[0].item() for x, _ in session_cases.samples(25))
    for mine, theirs in zip(first["passes"], second["passes"], strict=True):
        assert len(mine) == len(theirs) == 13
        assert sorted({*mine.tolist(), *theirs.tolist()}) == pytest.approx(every)
    assert not torch.equal(*first["passes"])


def test_without_padding_each_sample_comes_once(one_session):
    (first, second), _ = one_session
    assert (first["samples"], second["samples"]) == ((13, 4, 1, 1), (12, 3, 0, 0))


def test_a_session_logs_and_saves(one_session):
    (first, second), folder = one_session
    assert first["metrics"] == {"rank": 0, "mean": 0.5}
    assert second["metrics"] == {"rank": 1, "mean": 0.5}
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert '"step": 6' in lines[0]
    assert '"rank": 0.0' in lines[0]
    for kept in (first, second):
        assert kept["rest"] == 6
        assert kept["loaded"]
    assert first["alone"] == (4, 1)
    assert torch.equal(first["drawn before"], second["drawn before"])
    assert not torch.equal(first["drawn"], second["drawn"])  # not the same dropout
    assert "printed by 0" in (folder / "run.out").read_text()
    assert "printed by 1" not in (folder / "out" / "logs" / "rank-1.log").read_text()


def test_a_launched_function_runs_on_both_ranks(everything):
    for _, _, kept, _ in everything[1]:
        assert kept["gathered"].tolist() == [2, 4]
        assert kept["again"].tolist() == [1, 2]
        for key, value in session_cases.by_hand("sgd").items():
            torch.testing.assert_close(kept["trained"][key], value, rtol=1e-5, atol=1e-6)


def test_a_session_that_is_left_open_has_trained(everything):
    assert [steps for _, _, _, steps in everything[1]] == [6, 6]


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
