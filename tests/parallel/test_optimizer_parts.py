"""An optimizer that steps parts of parameters otherwise than whole ones is found."""

import pytest
import torch
from torch import nn, optim

from geartrain_parallel.optimizer_parts import steps_in_parts

#: All optimizers of torch, and whether they step halves of flat parameters as whole ones.
COMPUTE_FROM_WHOLES = {"Adafactor", "Muon"}
NAMES = sorted(
    name
    for name, cls in vars(optim).items()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
)


def halves(_, value):
    return value.flatten().chunk(2)


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_of_torch(name):
    shapes = [(5, 3)] if name == "Muon" else [(5, 3), (5,), ()]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = getattr(optim, name)(parameters)
    before = torch.get_rng_state()
    works = steps_in_parts(optimizer, halves, 2, name == "LBFGS")
    assert works == (name not in COMPUTE_FROM_WHOLES)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(each, torch.ones_like(each)) for each in parameters)


class Scaled(optim.SGD):
    """Divides each gradient by its norm; of a part that is another one."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm() + 1e-6
        return super().step(closure)


class NeedsMore(Scaled):
    def __init__(self, params, model):
        super().__init__(params, lr=0.1)


@pytest.mark.parametrize(
    ("made", "works"),
    [
        (lambda p: Scaled([p], lr=0.1), False),
        (lambda p: Scaled([p], lr=0.0), False),  # a warm-up begins so
        (lambda p: Scaled([("weight", p)], lr=torch.tensor(0.1)), False),
        (lambda p: NeedsMore([p], nn.Linear(1, 1)), True),
        (lambda p: optim.SGD([{"params": [p], "lr": 0.1}, {"params": []}]), True),
    ],
)
def test_optimizers_of_a_user(made, works):
    assert steps_in_parts(made(nn.Parameter(torch.ones(4, 4))), halves, 2, False) == works
