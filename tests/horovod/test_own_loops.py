"""Two ranks give the weights of one process on the whole batch.

Tested with manual optimisation, Sessions, closures, several optimizers and mixed precision.
"""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_testing.launching import launched

from ..ddp import cases, manual, session_cases

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(400)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return each rank's weights, by kind and case."""
    folder = tmp_path_factory.mktemp("own-loops")
    with launched(
        str(HERE / "own_loops.py"), str(folder), folder=folder, PYTHONPATH=str(HERE.parents[1])
    ) as run:
        run.succeed(300)
    return [torch.load(folder / f"own-{rank}.pt", weights_only=False) for rank in range(2)]


def assert_as(two_ranks, kind, case, expected):
    first, second = (kept[kind, case] for kept in two_ranks)
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(first[name], second[name]), f"{name} differs between ranks"


#: geartrain's hooks, and hvd.DistributedOptimizer.
WHOSE = pytest.mark.parametrize("whose", ["", ", horovod's optimizer"], ids=["ours", "horovods"])


@WHOSE
@pytest.mark.parametrize("how", manual.STEPS)
def test_manual_optimisation(two_ranks, how, whose):
    expected = manual.by_hand(how, cases.samples())
    if whose:  # it gives zeros to unused parameters, so weight decay changes them
        expected = {
            name: value
            for name, value in expected.items()
            if not name.startswith(("unused", "extra"))
        }
    assert_as(two_ranks, "manual", how + whose, expected)


@WHOSE
@pytest.mark.parametrize("name", session_cases.CASES)
def test_session(two_ranks, name, whose):
    assert_as(two_ranks, "session", name + whose, session_cases.by_hand(name))


@WHOSE
def test_two_models_of_a_session_with_the_same_parameter_names(two_ranks, whose):
    nets, batches = [cases.Net(), cases.Net("adam")], DataLoader(cases.samples(), 8)
    optimizers = [net.configure_optimizers() for net in nets]
    for i, (x, y) in enumerate(batches):
        for net, optimizer in list(zip(nets, optimizers, strict=True))[0 if i % 2 else 1 :]:
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            optimizer.step()
    expected = {
        f"{i}.{name}": value
        for i, net in enumerate(nets)
        for name, value in net.state_dict().items()
    }
    assert_as(two_ranks, "session", f"two models{whose}", expected)


@WHOSE
@pytest.mark.parametrize("name", ["lbfgs", "two", "gentle"])
def test_two_ranks_give_the_weights_of_one_process(two_ranks, name, whose):
    module = cases.Net() if name == "gentle" else cases.Net(name)
    one = gt.Trainer(
        accelerator="cpu",
        max_epochs=1,
        enable_progress_bar=False,
        precision="16-mixed" if name == "gentle" else "32-true",
    )
    one.fit(module, DataLoader(cases.samples(), 8))
    name += whose
    if name.startswith("gentle"):  # autocast computes in float16 on other batches
        for key, value in module.state_dict().items():
            torch.testing.assert_close(two_ranks[0]["fit", name][key], value, rtol=1e-3, atol=1e-4)
            assert torch.equal(two_ranks[0]["fit", name][key], two_ranks[1]["fit", name][key])
    else:
        assert_as(two_ranks, "fit", name, module.state_dict())


@WHOSE
def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks, whose):
    first, second = (kept["fit", f"overflow{whose}"] for kept in two_ranks)
    assert first["metrics"]["skipped_steps"] == second["metrics"]["skipped_steps"] == 1
    assert all(
        torch.equal(first[name], second[name]) for name in first if name not in ("metrics", "step")
    )
