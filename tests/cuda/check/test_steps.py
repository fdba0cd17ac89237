"""What a step may be: accumulated, clipped, manual, with a closure, in a loop of the user."""

import pytest
import torch

import geartrain as gt

from .device import DEVICE, ON_DEVICE, Net, assert_equal, by_hand, fit, loader, trainer

pytestmark = ON_DEVICE


@pytest.mark.parametrize("options", [{}, {"accumulate": 4}, {"clip": 0.05}])
def test_weights_equal_those_of_a_loop_by_hand(options):
    of_trainer = {
        "accumulate_grad_batches": options.get("accumulate", 1),
        "gradient_clip_val": options.get("clip"),
    }
    assert_equal(fit(**of_trainer), by_hand(Net(), **options))


def test_the_result_is_that_of_the_cpu():
    assert_equal(fit(), fit(accelerator="cpu"), rtol=1e-4, atol=1e-5)


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(torch.nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


def test_manual_optimisation():
    assert_equal(fit(Manual()), by_hand(Net()))


class SecondOrder(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def test_lbfgs():
    net = Net().to(DEVICE)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    for x, y in loader():
        x, y = x.to(DEVICE), y.to(DEVICE)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_equal(fit(SecondOrder(), max_epochs=1), net)


def test_a_session():
    net = Net()
    with gt.Session(accelerator=DEVICE, devices=1, seed=1) as session:
        model, optimizer = session.setup(net, torch.optim.Adam(net.parameters(), lr=net.lr))
        for _ in range(2):
            for x, y in session.setup_dataloaders(loader()):
                assert x.device.type == DEVICE
                optimizer.zero_grad()
                session.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
    assert_equal(net, by_hand(Net()))


def test_activation_checkpointing():
    options = {"plugins": ["activation_checkpointing"]}
    options["plugin_options"] = {"activation_checkpointing": {"units": ["Linear"]}}
    # With dropout: the units that are computed again must draw the same numbers.
    assert_equal(fit(Net(dropout=0.5), **options), fit(Net(dropout=0.5)))


def test_evaluation_is_that_of_torch():
    net, one = Net(), trainer()
    (validated,) = one.validate(net, loader(24))
    (tested,) = one.test(net, loader(24))
    predicted = torch.cat(one.predict(net, loader(24)))
    x, y = (tensor.to(DEVICE) for tensor in next(iter(loader(24, batch_size=24))))
    outputs = net.to(DEVICE)(x)
    right = torch.nn.functional.mse_loss(outputs, y).item()
    assert validated["val_loss"] == pytest.approx(right, rel=1e-5)
    assert tested["test_loss"] == pytest.approx(right, rel=1e-5)
    torch.testing.assert_close(predicted.to(DEVICE), outputs.detach(), rtol=1e-4, atol=1e-5)


class Nondeterministic(Net):
    """Adds many rows to few: on a GPU the order of additions is not fixed by default."""

    def forward(self, x):
        rows = torch.arange(4096, device=x.device) % len(x)
        spread = self.net(x)[rows] * torch.linspace(0.5, 1.5, 4096, device=x.device)[:, None]
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        return torch.zeros(len(x), 1, device=x.device).index_add(0, rows, spread) / 4096 * len(x)


def test_two_deterministic_runs_are_equal():
    first, second = (fit(Nondeterministic(), deterministic=True) for _ in range(2))
    assert first.deterministic
    assert_equal(first, second)
    assert not torch.are_deterministic_algorithms_enabled()
