"""Seeds, and that torch's global state is restored."""

import random

import numpy as np
import torch
from small_models import Net, assert_equal, differ, loader, trainer, weights

import geartrain as gt


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item(), torch.randn(1).item()


def test_seed_everything():
    assert gt.seed_everything(3) == 3
    first = draw()
    gt.seed_everything(3)
    assert draw() == first
    gt.seed_everything(4)
    other = draw()
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_module_made_after_the_trainer_has_the_seeds_weights():
    def made(seed):
        trainer(seed=seed)
        return weights(Net())

    assert_equal(made(1), made(1))
    assert differ(made(1), made(2))


def test_the_run_starts_from_the_seed_whatever_was_drawn_before():
    """The same order of samples, the same dropout."""

    class Drops(Net):
        def forward(self, x):
            return torch.nn.functional.dropout(super().forward(x))

    def trained(drawn):
        one, net = trainer(seed=5, max_epochs=2), Drops()
        torch.rand(drawn)
        one.fit(net, loader(shuffle=True))
        return net

    assert_equal(trained(0), trained(7))


def test_without_a_seed_the_generators_are_not_changed():
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    trainer()
    assert torch.equal(torch.rand(3), expected)
