"""``self.save_hyperparameters()`` keeps objects too, and as many arguments as the user names."""

from argparse import Namespace

import pytest
from torch import nn

import geartrain as gt


def test_objects_are_kept_but_not_those_to_ignore():
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


def test_a_child_that_saves_keeps_what_it_passes_on_as_kwargs():
    class Parent(gt.Module):
        def __init__(self, hidden=3, *, lr=0.1, act=nn.ReLU, **more):
            super().__init__()

    class Saving(Parent):
        def __init__(self, width=8, **kwargs):
            super().__init__(**kwargs)
            self.save_hyperparameters()

    assert Saving(lr=0.5, act=nn.Tanh).hparams == {"width": 8, "lr": 0.5, "act": nn.Tanh}
