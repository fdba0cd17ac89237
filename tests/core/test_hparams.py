"""What a module was made with is known without its author's doing, and stands in the plan."""

import copy
import gc
import json
import pickle

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain import hookimpl, hparams

from .models import EvalNet, Net, fit, loader, trainer


class Made(EvalNet):
    def __init__(self, hidden: int, lr=0.1, *, sizes=(1, 2), act=nn.ReLU, net=None, **more):
        super().__init__()
        self.lr = lr


def test_arguments_with_their_defaults_by_name():
    module = Made(3, sizes=[4], extra="e")
    assert module.hparams == {"hidden": 3, "lr": 0.1, "sizes": [4], "net": None, "extra": "e"}
    assert module.hparams.hidden == module.hparams["hidden"] == 3


def test_an_object_is_kept_only_where_asked_for():
    with pytest.raises(AttributeError, match=r"no 'act'; it has hidden, lr, .*self.save_hyperparameters\(\)"):
        _ = Made(3).hparams.act
    with pytest.raises(KeyError, match="'act'"):
        _ = Made(3).hparams["act"]

    class Saves(gt.Module):
        def __init__(self, act=nn.ReLU, lr=0.1, secret="s"):
            super().__init__()
            self.save_hyperparameters(ignore="secret")

    assert Saves(act=nn.Tanh).hparams == {"act": nn.Tanh, "lr": 0.1}

    class Some(gt.Module):
        def __init__(self, act=nn.ReLU, lr=0.1):
            super().__init__()
            self.save_hyperparameters("lr")

    assert Some().hparams == {"lr": 0.1}


def test_an_unknown_name_is_an_error():
    class Wrong(gt.Module):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters("rl")

    with pytest.raises(ValueError, match="Wrong was not made with an argument 'rl', but with lr"):
        Wrong()


def test_wrong_arguments_are_the_constructors_own_error():
    with pytest.raises(TypeError, match="hidden"):
        Made()


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_have_them_too_and_what_does_not_pickle_is_not_in_them(again):
    module = again(Made(3, act=lambda x: x))
    assert module.hparams == {"hidden": 3, "lr": 0.1, "sizes": (1, 2), "net": None}


def test_nothing_of_a_module_is_kept_when_it_has_gone():
    gc.collect()  # modules of earlier tests may be garbage still
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


def test_a_module_that_is_only_a_class_has_none():
    assert trainer().check(Net).hyperparameters == {}


def test_a_trained_module_is_still_one():
    module = Made(2)
    fit(module)
    assert module.hparams.hidden == 2
