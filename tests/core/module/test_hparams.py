"""The arguments of a module are its hyperparameters, without a call, and are in the plan."""

import copy
import gc
import json
import pickle
from argparse import Namespace

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


def test_an_object_is_kept_only_on_request():
    with pytest.raises(
        AttributeError, match=r"no 'act'; it has hidden, lr, .*self.save_hyperparameters\(\)"
    ):
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


def test_an_argument_that_is_assigned_again_is_kept_as_it_is_at_the_call():
    class Base(gt.Module):
        def __init__(self, hidden=None, lr=0.1):
            super().__init__()
            hidden = hidden or 32
            self.save_hyperparameters()
            lr = 0.5  # noqa: F841

    class Heir(Base):
        def __init__(self, depth=0, **kwargs):
            depth += 1
            super().__init__(**kwargs)

    assert Base().hparams == {"hidden": 32, "lr": 0.1}
    assert Heir(lr=0.2).hparams == {"depth": 1, "lr": 0.2, "hidden": 32}


def test_an_unknown_name_is_an_error():
    class Wrong(gt.Module):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters("rl")

    with pytest.raises(
        ValueError,
        match=r"Wrong was not made with an argument 'rl', but with lr\. Fix: use one of these; ",
    ):
        Wrong()


@pytest.mark.parametrize("kind", [dict, Namespace])
def test_a_dict_or_a_namespace_is_kept_in_place_of_arguments(kind):
    class Takes(gt.Module):
        def __init__(self, config, ignore=()):
            super().__init__()
            self.save_hyperparameters(config, ignore=ignore)

    given = kind(lr=0.5, act=nn.Tanh)
    assert Takes(given).hparams == {"lr": 0.5, "act": nn.Tanh}
    assert Takes(given, ignore=["act"]).hparams == {"lr": 0.5}
    with pytest.raises(
        ValueError, match=r"Takes.save_hyperparameters was given int. Fix: names of"
    ):
        Takes(3)


def test_a_second_call_adds_to_the_first():
    class Parent(gt.Module):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)

    class Child(Parent):
        def __init__(self, width=3, depth=2):
            super().__init__({"lr": 0.1, "width": 1})
            self.save_hyperparameters("width")
            self.save_hyperparameters({"more": "m"})

    assert Child().hparams == {"lr": 0.1, "width": 3, "more": "m"}


class Parent(gt.Module):
    def __init__(self, hidden=3, *, lr=0.1, act=nn.ReLU, **more):
        super().__init__()


class Saving(Parent):
    def __init__(self, width=8, **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters()


class Passing(Parent):
    def __init__(self, width=8, **kwargs):
        super().__init__(hidden=2 * width, **kwargs)


class Closed(Parent):
    def __init__(self, width=8):
        super().__init__(hidden=2 * width)


def test_defaults_of_parents_are_among_the_arguments_of_a_child_with_kwargs():
    assert Saving().hparams == {"width": 8, "hidden": 3, "lr": 0.1, "act": nn.ReLU}
    assert Saving(lr=0.5, extra=1).hparams == {
        "width": 8,
        "hidden": 3,
        "lr": 0.5,
        "act": nn.ReLU,
        "extra": 1,
    }
    assert Passing(4).hparams == {"width": 4, "hidden": 8, "lr": 0.1}  # as it was passed on
    assert Closed(4).hparams == {"width": 4}

    class Grandchild(Passing):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    assert Grandchild(2).hparams == {"args": (2,), "width": 2, "hidden": 4, "lr": 0.1}

    class Data(gt.DataModule):
        def __init__(self, batch_size=4):
            super().__init__()

    class Mine(Data):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)

    assert Mine().hparams == {"batch_size": 4}


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
