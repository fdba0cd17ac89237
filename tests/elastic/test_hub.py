"""Ranks of one process meet in a collective; here without a strategy's processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from geartrain import TrainingError, World
from geartrain_elastic import ElasticStrategy
from geartrain_elastic.hub import Call, ProcessState

from .threads import hub_of, in_threads


class Net(nn.Module):
    """Parameters of one shape; a rank's gradient of each is its number and the parameter's."""

    def __init__(self, rank, names, frozen):
        super().__init__()
        for number, name in enumerate(names):
            parameter = nn.Parameter(torch.zeros(2), requires_grad=name not in frozen)
            if parameter.requires_grad:
                parameter.grad = torch.full((2,), 10.0 * (number + 1) + rank)
            self.register_parameter(name, parameter)


def reduced(frozen, names=("ab", "ab")):
    """Return the gradients of each rank after their reduction, or its error."""
    hub = hub_of(len(frozen))
    for rank in range(len(frozen)):
        hub.seat(rank)
    start = ProcessState.now()

    def work(rank):
        hub.begin(rank, start)
        module, strategy = Net(rank, names[rank], frozen[rank]), ElasticStrategy()
        strategy.hub = hub
        run = SimpleNamespace(
            module=module,
            world=World(rank, len(frozen), rank, len(frozen), 0),
            parameters_of_step=lambda: dict(module.named_parameters()),
        )
        try:
            strategy.reduce_gradients(run)
            named = module.named_parameters()
            return {n: None if p.grad is None else p.grad[0].item() for n, p in named}
        finally:
            hub.finish(rank)

    return in_threads(work, len(frozen))


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        (("", ""), {"a": 10.5, "b": 20.5}),
        (("a", "b"), {"a": 5.5, "b": 10.0}),  # each has one, of equal shapes
        (("", "a"), {"a": 5.0, "b": 20.5}),
        (("ab", "a"), {"a": None, "b": 10.5}),
    ],
)
def test_each_parameter_gets_the_mean_of_its_gradients_whichever_a_rank_has_frozen(
    frozen, expected
):
    assert reduced(frozen) == [expected, expected]


def test_each_rank_has_the_default_dtype_that_it_has_set():
    hub, start = hub_of(2), ProcessState.now()

    def work(rank):
        hub.begin(rank, start)
        seen = []
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            hub.exchange(rank, Call("barrier"))
            seen.append(torch.get_default_dtype())
            if rank == 0:  # it leaves the step first
                torch.set_default_dtype(torch.float32)
        hub.finish(rank)
        return seen

    for rank in range(2):
        hub.seat(rank)
    assert in_threads(work, 2) == [[torch.float64, torch.float32]] * 2


@pytest.mark.parametrize("names", ["abc", "ba", "ac"])
def test_ranks_with_different_parameters_end_with_one_error(names):
    gradients = f"and rank 1 in the reduction of {len(names)} gradients (number "
    for error in reduced(("", ""), names=("ab", names)):
        assert type(error) is TrainingError
        assert str(error).startswith("rank 0 is in the reduction of 2 gradients (number ")
        assert gradients in str(error)
