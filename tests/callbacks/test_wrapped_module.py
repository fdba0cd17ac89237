"""Any nn.Module trains with a loss and an optimizer, without being subclassed."""

import copy
from functools import partial

import pytest
import torch
from small_models import Net, assert_equal, differ, loader, samples, trainer
from torch import nn
from torch.nn import functional

from geartrain import TrainingError, UsageError

SGD = partial(torch.optim.SGD, lr=0.1)


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def by_hand(module, batches):
    module = copy.deepcopy(module)
    optimizer = SGD(module.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize(
    "make", [lambda net: SGD, lambda net: SGD(net.parameters())], ids=["made", "given"]
)
def test_it_trains_as_a_loop_written_by_hand(make):
    net = model()
    expected = by_hand(net, loader())
    one = trainer()
    one.fit(net, loader(), loader(), loss=functional.mse_loss, optimizer=make(net))
    assert_equal(net, expected)
    assert {"train_loss", "train_loss_step", "train_loss_epoch", "val_loss"} == set(
        one.callback_metrics
    )


def test_the_other_commands():
    net, one = model(), trainer()
    x, y = samples().tensors
    with torch.no_grad():
        expected = float(functional.mse_loss(net(x), y))
    assert one.validate(net, loader(), loss=functional.mse_loss) == [
        {"val_loss": pytest.approx(expected)}
    ]
    assert one.test(net, loader(), loss=functional.mse_loss) == [
        {"test_loss": pytest.approx(expected)}
    ]
    assert torch.allclose(torch.cat(one.predict(net, loader())), net(x), atol=1e-6)


def test_the_model_of_the_last_run_takes_another_loss():
    net, one = model(), trainer()
    one.fit(net, loader(), loss=functional.mse_loss, optimizer=SGD)
    x, y = samples().tensors
    with torch.no_grad():
        expected = float(functional.l1_loss(net(x), y))
    assert one.validate(dataloaders=loader(), loss=functional.l1_loss) == [
        {"val_loss": pytest.approx(expected)}
    ]


def test_checkpoints_have_the_models_own_names(tmp_path):
    net = model()
    trainer(output=tmp_path / "run").fit(net, loader(), loss=functional.mse_loss, optimizer=SGD)
    path = tmp_path / "run" / "last.ckpt"
    stored = torch.load(path, weights_only=True)["model"]
    fresh = model()
    fresh.load_state_dict(stored)
    assert_equal(fresh, net)
    again = model()
    trainer().validate(again, loader(), ckpt_path=path, loss=functional.mse_loss)
    assert_equal(again, net)


class Answers(nn.Module):
    """Takes keywords, and has the loss in its output, as models of transformers."""

    def __init__(self, form=dict):
        super().__init__()
        self.layer, self.form = nn.Linear(3, 1), form

    def forward(self, x, y=None):
        out = self.layer(x)
        found = {"out": out} if y is None else {"out": out, "loss": functional.mse_loss(out, y)}
        return self.form(found)


class Output:
    def __init__(self, found):
        self.__dict__.update(found)


@pytest.mark.parametrize("form", [dict, Output])
def test_a_model_that_computes_its_own_loss(form):
    batches = [{"x": x, "y": y} for x, y in loader()]
    net = Answers(form)
    before = copy.deepcopy(net)
    trainer().fit(net, batches, loss=None, optimizer=SGD)
    assert differ(net, before)


@pytest.mark.parametrize(
    ("batch", "inputs", "target"),
    [
        ((torch.ones(2, 3), torch.zeros(2, 3), torch.ones(2)), 2, torch.ones(2)),
        ([torch.ones(2, 3), torch.ones(2)], 1, torch.ones(2)),
        ((torch.ones(2, 3),), 1, torch.ones(2, 3)),
    ],
)
def test_arguments_of_the_model_and_the_loss(batch, inputs, target):
    got = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, *given):
            got.append(len(given))
            return self.layer(given[0])

    def loss(output, against):
        got.append(against)
        return output.mean()

    trainer().fit(Looks(), [batch], loss=loss, optimizer=SGD)
    assert got[0] == inputs
    assert torch.equal(got[1], target)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"loss": functional.mse_loss},
            r"Sequential is a plain nn.Module, and optimizer=None.*Fix: optimizer=torch.optim",
        ),
        ({"loss": "mse", "optimizer": SGD}, "loss='mse' is no function"),
        (
            {"loss": nn.MSELoss, "optimizer": SGD},
            r"loss=MSELoss is a class\. Fix: loss=MSELoss\(\)",
        ),
        (
            {"loss": functional.mse_loss, "optimizer": SGD(nn.Linear(1, 1).parameters())},
            "steps parameters that Sequential does not have",
        ),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        trainer().fit(model(), loader(), **options)


def test_a_modules_own_loss_and_optimizer_are_not_replaced_in_silence():
    with pytest.raises(UsageError, match="Net has its own"):
        trainer().fit(Net(), loader(), loss=functional.mse_loss)
    with pytest.raises(UsageError, match="Net has its own"):
        trainer().fit(Net(), loader(), optimizer=SGD)


def test_an_output_without_a_loss_is_named():
    with pytest.raises(
        TrainingError, match=r"Sequential gave Tensor without a loss in it\. Fix: loss=FUNCTION"
    ):
        trainer().fit(model(), loader(), optimizer=SGD)
