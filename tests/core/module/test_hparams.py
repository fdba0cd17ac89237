"""The arguments of a module are its hyperparameters, without a call, and are in the plan."""

import copy
import gc
import json
import pickle

import pytest
import torch
from small_models import EvalNet, Net, loader, trainer
from torch import nn

import geartrain as gt
from geartrain import hookimpl
from geartrain.module import hparams


class Made(EvalNet):
    def __init__(self, hidden: int, lr=0.1, *, sizes=(1, 2), act=nn.ReLU, net=None, **more):
        super().__init__()
        self.lr = lr


def test_arguments_with_their_defaults_by_name():
    module = Made(3, sizes=[4], extra="e")
    assert module.hparams == {"hidden": 3, "lr": 0.1, "sizes": [4], "net": None, "extra": "e"}
    assert module.hparams.hidden == module.hparams["hidden"] == 3


def test_tensors_and_parameters_are_objects():
    module = Made(3, start=nn.Parameter(torch.ones(1)), mean=torch.ones(1))
    assert module.hparams.keys() == {"hidden", "lr", "sizes", "net"}


def test_an_object_is_kept_only_on_request():
    with pytest.raises(
        AttributeError, match=r"no 'act'; it has hidden, lr, .*self.save_hyperparameters\(\)"
    ):
        _ = Made(3).hparams.act
    with pytest.raises(KeyError, match="'act'"):
        _ = Made(3).hparams["act"]


class Parent(gt.Module):
    def __init__(self, hidden=3, *, lr=0.1, act=nn.ReLU, **more):
        super().__init__()


class Passing(Parent):
    def __init__(self, width=8, **kwargs):
        super().__init__(hidden=2 * width, **kwargs)


class Closed(Parent):
    def __init__(self, width=8):
        super().__init__(hidden=2 * width)


def test_a_child_with_kwargs_keeps_what_it_was_given():
    assert Passing(4, lr=0.2).hparams == {"width": 4, "lr": 0.2}
    assert Closed(4).hparams == {"width": 4}
    assert Passing(**Passing(4, lr=0.2).hparams).hparams == {"width": 4, "lr": 0.2}


@pytest.mark.parametrize("again", [copy.copy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_have_them_too_but_not_those_that_do_not_pickle(again):
    module = again(Made(3, act=lambda x: x))
    assert module.hparams == {"hidden": 3, "lr": 0.1, "sizes": (1, 2), "net": None}


def test_nothing_of_a_module_is_kept_after_its_end():
    gc.collect()  # modules of earlier tests may not be collected yet
    before = len(hparams._MADE_WITH)
    module = Made(3, net=nn.Linear(1, 1))
    assert len(hparams._MADE_WITH) == before + 1
    del module
    gc.collect()
    assert len(hparams._MADE_WITH) == before


class Data(gt.DataModule):
    def __init__(self, batch_size=4, scale=float("inf")):
        self.batch_size = batch_size

    def train_dataloader(self):
        return loader(batch_size=self.batch_size)


def test_the_plan_and_plan_json_have_them(tmp_path):
    class Sees:
        @hookimpl
        def check_plan(self, plan):
            self.seen = dict(plan.hyperparameters)

    sees = Sees()
    one = trainer(plugins=[sees], output=tmp_path / "run")
    one.fit(Made(3, act=nn.Tanh, net=nn.Linear(1, 1)), datamodule=Data(6))
    expected = {"hidden": 3, "lr": 0.1, "sizes": [1, 2], "data.batch_size": 6, "data.scale": "inf"}
    assert sees.seen == expected
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["hyperparameters"] == expected

    class Saves(Net):
        def __init__(self, act=nn.ReLU, make=nn.functional.relu, net=None, sizes=None):
            super().__init__()
            self.save_hyperparameters()

    made = Saves(net=nn.Linear(1, 1), sizes={1: (torch.device("cpu"),)})
    assert one.check(made).hyperparameters == {
        "act": "torch.nn.modules.activation.ReLU",
        "make": "torch.nn.functional.relu",
        "net": "torch.nn.modules.linear.Linear",
        "sizes": {"1": ["torch.device"]},
    }
