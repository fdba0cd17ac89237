"""Session with ddp_spawn: every process runs the loop, which is a function."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import geartrain as gt

from .models import loader


def make(method="fork", **options):
    return gt.Session(
        **{
            "accelerator": "cpu",
            "devices": 2,
            "strategy": "ddp_spawn",
            "strategy_options": {"start_method": method, "timeout": 60.0},
            **options,
        }
    )


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(session, module, epochs=2):
    model, optimizer = session.setup(module, torch.optim.Adam(module.parameters(), lr=0.01))
    batches = session.setup_dataloaders(loader())
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            session.backward(functional.mse_loss(model(x), y))
            optimizer.step()
        session.log("rank", session.global_rank, sync_dist=True)
    return {
        "weights": module.state_dict(),
        "steps": session.global_step,
        "ranks": session.all_gather(torch.tensor(session.global_rank)).tolist(),
    }


def by_hand(epochs=2):
    """Train on whole batches, which are twice as large as those of a rank."""
    module = net()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(epochs):
        for x, y in torch.utils.data.DataLoader(loader().dataset, 8):
            optimizer.zero_grad()
            functional.mse_loss(module(x), y).backward()
            optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize(
    "method",
    ["fork", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("spawn", "forkserver"))],
)
def test_two_ranks_train_as_one_process_does(method, tmp_path):
    module = net()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    session = make(method, output=tmp_path / "run")
    brought = session.launch(train, module)
    assert (brought["steps"], brought["ranks"]) == (12, [0, 1])
    for key, value in by_hand().items():
        torch.testing.assert_close(brought["weights"][key], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(module.state_dict()[key], before[key])  # ranks trained copies
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert '"rank": 0.5' in lines[0]


def test_a_session_can_be_launched_twice_and_seeds_each_time():
    session = make(seed=11)

    def draw(session):
        return torch.rand(2), session.all_gather(torch.rand(2))

    one, two = session.launch(draw), session.launch(draw)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1][0], one[1][1])  # before the first batch, all ranks draw the same


def test_an_error_of_a_rank_is_raised_in_the_caller():
    def work(session):
        if session.global_rank == 1:
            raise KeyError("mine")
        session.barrier()

    with pytest.raises(KeyError, match="mine"):
        make().launch(work)


def test_an_argument_that_cannot_be_pickled_is_named():
    import threading

    module = net()
    module.lock = threading.Lock()
    with pytest.raises(
        gt.UsageError, match=r"argument 1 of launch.lock: _thread.lock cannot be pickled"
    ):
        make("forkserver").launch(train, module)


def test_a_session_must_be_launched_with_a_function():
    session = make()
    with pytest.raises(
        gt.UsageError,
        match=r"geartrain-spawn\[ddp_spawn\] starts its processes on a function. Fix: session\.",
    ):
        session.launch()
    with pytest.raises(gt.UsageError, match=r"setup comes before session.launch\(\)"):
        session.setup(net())


def test_plugins_state_and_a_returned_model_come_back():
    class Counts:
        def __init__(self):
            self.steps = 0

        @gt.hookimpl
        def on_step_end(self):
            self.steps += 1

    def work(session):
        module = net()
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for x, y in session.setup_dataloaders(loader()):
            session.backward(functional.mse_loss(model(x), y))
            optimizer.step()
        return model

    counts = Counts()
    model = make(plugins=[counts]).launch(work)
    assert type(model) is nn.Sequential
    assert counts.steps == 6
