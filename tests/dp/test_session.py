"""Session with dp and ddp2: the inputs of each call are split, and the outputs combined."""

from typing import ClassVar

import pytest
import torch
from several_ranks import results
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt


class Net(nn.Module):
    """Records the number of rows of each call."""

    seen: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x, *, scale):
        self.seen.append((len(x), len(scale)))
        return {"y": self.layer(x) * scale}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 3, generator=generator), torch.rand(6, 1, generator=generator))
        for _ in range(3)
    ]


def by_hand():
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for x, scale in batches():
        optimizer.zero_grad()
        net(x, scale=scale)["y"].square().mean().backward()
        optimizer.step()
    return net.state_dict()


def loop(session):
    net = Net()
    model, optimizer = session.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
    for x, scale in session.setup_dataloaders(batches()):
        optimizer.zero_grad()
        session.backward(model(x, scale=scale)["y"].square().mean())
        optimizer.step()
    with torch.no_grad():
        assert model(x, scale=scale)["y"].shape == (6, 2)
    return net.state_dict()


def test_dp_splits_all_inputs_and_trains_like_one_device():
    expected = by_hand()
    Net.seen.clear()
    with gt.Session(accelerator="cpu", strategy="dp", devices=2) as session:
        trained = loop(session)
    assert Net.seen == [(3, 3)] * 8
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-6, atol=1e-6)


def test_inputs_that_cannot_be_split_are_refused():
    with gt.Session(accelerator="cpu", strategy="dp", devices=2) as session:
        model = session.setup(Net())
        with pytest.raises(gt.TrainingError, match="rows, but the batch has 6"):
            model(torch.ones(6, 3), scale=torch.ones(1))


# --- ddp2 -----------------------------------------------------------------------------------------


class Watched(nn.Sequential):
    """Records the number of rows of each call, and whether gradients were enabled."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.calls = []

    def forward(self, x):
        self.calls.append((len(x), torch.is_grad_enabled()))
        return super().forward(x)


def be_a_node():
    torch.manual_seed(0)
    net = Watched(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.linspace(-1, 1, 48).reshape(16, 3)
    with gt.Session(accelerator="cpu", strategy="ddp2", devices=2, num_nodes=2) as session:
        session.launch()
        model, optimizer = session.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
        for inputs, y in session.setup_dataloaders(
            DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)
        ):
            optimizer.zero_grad()
            session.backward(nn.functional.mse_loss(model(inputs), y))
            optimizer.step()
        if session.is_global_zero:
            with torch.no_grad():
                model(x[:4])
        return {"weights": net.state_dict(), "seen": net.calls}


def test_ddp2_reduces_over_nodes_and_splits_on_each(tmp_path):
    kept = results(tmp_path, be_a_node, place="node")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 48).reshape(16, 3)
    for inputs, targets in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    for key, value in net.state_dict().items():
        torch.testing.assert_close(kept[0]["weights"][key], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(kept[0]["weights"][key], kept[1]["weights"][key])
    assert kept[0]["seen"] == [(2, True)] * 4 + [(2, False)] * 2
    assert kept[1]["seen"] == [(2, True)] * 4
