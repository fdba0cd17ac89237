"""A Session on two ranks: it trains as one process does, and its collectives work."""

import warnings

import pytest
import torch
from regression import Net, samples, weights
from threads import equal
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.testing import ThreadRanks

from ..ddp.session_cases import CASES, by_hand, loop


def launch(function, **options):
    """Return the result of ``function(session)`` on each rank."""
    strategy = ThreadRanks(2)
    gt.Session(accelerator="cpu", strategy=strategy, **options).launch(function)
    return strategy.results


@pytest.mark.parametrize("name", [name for name in CASES if "buckets" not in name])
def test_two_ranks_train_as_one_process_does(name):
    first, second = launch(lambda session: loop(session, name), **CASES[name][1])
    assert equal(first, second)
    # float16 rounds. LBFGS divides by small differences of gradients, which makes rounding larger.
    rtol, atol = {"with a scaler": (1e-2, 1e-4), "lbfgs": (1e-4, 1e-5)}.get(name, (1e-5, 1e-6))
    for key, value in by_hand(name).items():
        torch.testing.assert_close(first[key], value, rtol=rtol, atol=atol)


class Manual(Net):
    automatic_optimization = False


@pytest.mark.parametrize("make", [Manual, lambda: nn.Sequential(nn.Linear(3, 1))])
def test_any_module_is_trained_by_all_ranks(make):
    def train(session):
        module = make()
        before = weights(module)
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for x, y in session.setup_dataloaders(DataLoader(samples(), 4)):
            session.backward(functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert not equal(module.state_dict(), before)
        return weights(module)

    assert equal(*launch(train))


def test_places_and_collectives():
    def work(session):
        rank = session.global_rank
        order = []
        with session.rank_zero_first():
            order.append(rank)
        assert session.all_gather({"x": torch.full((2,), float(rank))})["x"].tolist() == [
            [0, 0],
            [1, 1],
        ]
        assert [part.tolist() for part in session.all_gather(torch.ones(rank + 1))] == [[1], [1, 1]]
        reduced = {
            op: session.all_reduce(torch.tensor([rank, 10.0]), op).tolist()
            for op in ("mean", "sum", "min", "max")
        }
        assert reduced == {"mean": [0.5, 10], "sum": [1, 20], "min": [0, 10], "max": [1, 10]}
        assert session.all_reduce(torch.tensor(rank)).item() == 0.5
        assert session.all_reduce({"loss": rank + 0.5}, "sum")["loss"].item() == 2.0
        assert session.all_gather([rank])[0].tolist() == [0, 1]
        with pytest.raises(gt.TrainingError, match=r"the shapes \[\[1\], \[2\]\]. Fix"):
            session.all_reduce(torch.ones(rank + 1))
        assert session.broadcast({"from": rank}, src=1) == {"from": 1}
        return (
            rank,
            session.local_rank,
            session.world_size,
            session.is_global_zero,
            str(session.device),
        )

    assert launch(work) == [(0, 0, 2, True, "cpu"), (1, 1, 2, False, "cpu")]


@pytest.mark.parametrize("first", [0, 1])
def test_rank_0_comes_first(first):
    order = []

    def work(session):
        with session.rank_zero_first():
            order.append(session.global_rank)

    gt.Session(accelerator="cpu", strategy=ThreadRanks(2, first)).launch(work)
    assert order == [0, 1]


def test_loaders_are_sharded_and_shuffled_in_each_pass():
    def passes(session):
        loader = session.setup_dataloaders(DataLoader(samples(25), 4, shuffle=True))
        return [torch.cat([x[:, 0] for x, _ in loader]) for _ in range(2)]

    first, second = launch(passes, seed=5)
    every = sorted(x[0].item() for x, _ in samples(25))
    for mine, theirs in zip(first, second, strict=True):
        assert len(mine) == len(theirs) == 13
        assert sorted({*mine.tolist(), *theirs.tolist()}) == pytest.approx(every)
    assert not torch.equal(*first)


def test_without_padding_each_sample_comes_once():
    def counted(session):
        loaders = [
            session.setup_dataloaders(DataLoader(samples(n), 4), even=False) for n in (25, 1)
        ]
        return [(sum(len(x) for x, _ in loader), len(loader)) for loader in loaders]

    assert launch(counted) == [[(13, 4), (1, 1)], [(12, 3), (0, 0)]]


def test_training_on_unequal_numbers_of_batches_is_refused():
    def train(session):
        net = Net()
        model, optimizer = session.setup(net, net.configure_optimizers())
        loader = session.setup_dataloaders(DataLoader(samples(25), 4), even=False)
        for _ in zip(range(3), loader, strict=False):  # evaluates all
            pass
        for x, y in loader:
            session.backward(functional.mse_loss(model(x), y))
            optimizer.step()

    with pytest.raises(
        gt.TrainingError,
        match=r"the ranks have \[4, 3\] batches of this loader: ranks \[1\] have no batch after "
        r"the first 3, .* Fix: to train, leave out even=False",
    ):
        launch(train)


def test_logs_checkpoints_and_random_numbers(tmp_path):
    def train(session):
        net = Net(norm=True)
        model, optimizer = session.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
        before = torch.rand(1)
        for x, y in session.setup_dataloaders(DataLoader(samples(), 4)):
            session.backward(functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        drawn = torch.rand(1)
        session.log("rank", session.global_rank)
        session.log("mean", session.global_rank, sync_dist=True)
        metrics = dict(session.run.metrics)
        session.save(
            tmp_path / "state.ckpt",
            {"model": model, "optimizer": optimizer, "step": session.global_step},
        )
        other = session.setup(Net(norm=True))
        rest = session.load(tmp_path / "state.ckpt", {"model": other})
        assert rest["step"] == 6
        assert equal(other.state_dict(), session.broadcast(model.state_dict(), src=0))
        return metrics, before, drawn

    (metrics, before, drawn), (theirs, also, other) = launch(train, seed=5, output=tmp_path / "out")
    assert (metrics, theirs) == ({"rank": 0, "mean": 0.5}, {"rank": 1, "mean": 0.5})
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert '"step": 6' in lines[0]
    assert '"rank": 0.0' in lines[0]
    assert torch.equal(before, also)
    assert not torch.equal(drawn, other)  # so dropout differs


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all(rank):
    def fails(session):
        if session.global_rank == rank:
            raise ValueError("my own")
        session.barrier()

    with pytest.raises(ValueError, match="my own") as caught:
        launch(fails)
    assert caught.value.__notes__ == [f"rank {rank} of 2 raised this"]


@pytest.mark.parametrize("theirs", [{"b": 1.0}, {"a": 1.0, "b": 1.0}])
def test_ranks_that_log_different_names_are_an_error(theirs):
    with pytest.raises(
        gt.TrainingError,
        match=r"ranks 0 and 1 logged different metrics with sync_dist.*Fix: log the same names on",
    ):
        launch(
            lambda session: session.log_dict(
                theirs if session.global_rank else {"a": 0.0}, sync_dist=True
            )
        )


def test_models_that_differ_are_refused():
    with pytest.raises(gt.TrainingError, match="differs from rank 0"):
        launch(lambda session: session.setup(nn.Linear(3, 1 + session.global_rank)))


def test_a_call_of_the_original_model_is_an_error():
    def train(session):
        net = Net()
        _, optimizer = session.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in session.setup_dataloaders(DataLoader(samples(), 4)):
            session.backward(functional.mse_loss(net(x), y))
            optimizer.step()

    with pytest.raises(
        gt.TrainingError, match=r"Net was not called through the model that session\.setup returned"
    ):
        launch(train)


def test_a_function_runs_twice_with_arguments():
    session = gt.Session(accelerator="cpu", strategy=ThreadRanks(2))
    for scale in (1, 2):
        gathered = session.launch(
            lambda session, scale: session.all_gather(
                torch.tensor(float(session.global_rank + 1) * scale)
            ),
            scale,
        )
        assert gathered.tolist() == [scale, 2 * scale]


def test_a_correct_loop_causes_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(lambda session: loop(session, "sgd"))
