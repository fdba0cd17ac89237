"""A Session on two ranks of ddp trains like one process on the whole batch, and leaves nothing.

tests/session/test_on_ranks.py has the session's methods and errors.
"""

import pytest
import torch
import torch.distributed as dist
from several_ranks import failed, kept_by, results, succeeded
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain.parallel import is_connection

from . import session_cases
from .cases import Net, samples


def ddp_session(**options):
    return gt.Session(accelerator="cpu", devices=2, strategy="ddp", **options)


def train_all():
    return {name: session_cases.with_session(name) for name in session_cases.CASES}


two_ranks = kept_by(train_all)


@pytest.mark.parametrize("name", session_cases.CASES)
def test_two_ranks_train_as_one_process_does(two_ranks, name):
    expected = session_cases.by_hand(name)
    # float16 rounds. LBFGS divides by small differences of gradients, which amplifies rounding.
    rtol, atol = {"with a scaler": (1e-2, 1e-4), "lbfgs": (1e-4, 1e-5)}.get(name, (1e-5, 1e-6))
    for key, value in expected.items():
        torch.testing.assert_close(two_ranks[0][name][key], value, rtol=rtol, atol=atol)
        assert torch.equal(two_ranks[0][name][key], two_ranks[1][name][key]), (
            f"{key} differs between ranks"
        )


def train_without_with(fault=None, rank=None):
    """Train in a session that is not closed; return the number of steps."""
    session = ddp_session()
    session.launch()
    loop(session, fault, rank)
    return session.global_step


def loop(session, fault=None, rank=None, make=Net):
    net = make()
    model, optimizer = session.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for i, (x, y) in enumerate(session.setup_dataloaders(DataLoader(samples(), 4))):
        if i == 2 and session.global_rank == rank:
            raise ValueError(fault)
        session.backward(functional.mse_loss(model(x), y))
        optimizer.step()
    return net.state_dict()


def test_a_session_that_is_never_closed_closes_when_the_program_ends(tmp_path):
    for rank in succeeded(tmp_path, train_without_with):
        assert (rank.result, rank.printed) == (6, "")


class Manual(Net):
    automatic_optimization = False


def train_a_module_of_manual_optimisation():
    with ddp_session() as session:
        session.launch()
        return loop(session, make=Manual)


def test_a_module_of_manual_optimisation_is_trained_by_all_ranks(tmp_path):
    first, second = results(tmp_path, train_a_module_of_manual_optimisation)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


class Counting:
    calls = 0

    @hookimpl
    def reduce_bucket(self, bucket):
        self.calls += 1
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def count_reductions():
    counting = Counting()
    with ddp_session(plugins=[counting]) as session:
        session.launch()
        trained = session_cases.loop(session, "accumulating")
        return {"calls": counting.calls, "steps": session.global_step, "trained": trained}


def test_gradients_without_backward_sync_are_not_reduced(tmp_path):
    for kept in results(tmp_path, count_reductions):
        assert kept["calls"] == kept["steps"] == 3
        for key, value in session_cases.by_hand("accumulating").items():
            torch.testing.assert_close(kept["trained"][key], value, rtol=1e-5, atol=1e-6)


# --- faults --------------------------------------------------------------------------------------


def fail(fault, rank):
    with ddp_session() as session:
        session.launch()
        loop(session, fault, rank)


@pytest.mark.parametrize(("function", "rank"), [(fail, 0), (train_without_with, 1)])
def test_an_error_of_a_rank_ends_all(tmp_path, function, rank):
    ranks = failed(tmp_path, function, "that one", rank)
    assert ranks[rank].error == "ValueError: that one"
    assert is_connection(ranks[1 - rank].error)


# --- refused before anything starts --------------------------------------------------------------


def test_the_error_under_pytest_has_a_fix():
    session = ddp_session()
    with pytest.raises(
        gt.UsageError, match=r"under pytest it would run the tests again. Fix: .*ddp_spawn"
    ):
        session.launch()
    with pytest.raises(gt.UsageError, match=r"before session.launch\(\)"):
        session.setup(nn.Linear(1, 1))
