"""Learning rates are multiplied by the number of workers, and the schedule keeps its shape."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

rates = pytest.importorskip("geartrain_horovod.rates", reason="geartrain-horovod is not installed")
STEPS = 12


def optimizer(cls=torch.optim.SGD, **options):
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    return cls([{"params": [one], "lr": 0.1}, {"params": [two], "lr": 0.01}], lr=0.5, **options)


SCHEDULERS = {
    "none": lambda o: [],
    "StepLR": lambda o: [lr.StepLR(o, 3)],
    "LambdaLR": lambda o: [lr.LambdaLR(o, lambda step: 1 / (1 + step))],
    "CosineAnnealingLR": lambda o: [lr.CosineAnnealingLR(o, 8, eta_min=0.004)],
    "CosineAnnealingWarmRestarts": lambda o: [lr.CosineAnnealingWarmRestarts(o, 4, eta_min=0.004)],
    "LinearLR": lambda o: [lr.LinearLR(o, 0.2, total_iters=5)],
    "PolynomialLR": lambda o: [lr.PolynomialLR(o, 8)],
    "OneCycleLR": lambda o: [
        lr.OneCycleLR(o, max_lr=[0.3, 0.2], total_steps=STEPS + 1, cycle_momentum=False)
    ],
    "CyclicLR": lambda o: [
        lr.CyclicLR(o, base_lr=0.01, max_lr=[0.3, 0.2], step_size_up=3, cycle_momentum=False)
    ],
    "SequentialLR": lambda o: [
        lr.SequentialLR(
            o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 6, eta_min=0.002)], [3]
        )
    ],
    "ChainedScheduler": lambda o: [
        lr.ChainedScheduler([lr.ConstantLR(o, 0.5, 4), lr.ExponentialLR(o, 0.9)], optimizer=o)
    ],
    "nested twice": lambda o: [
        lr.SequentialLR(
            o,
            [lr.ChainedScheduler([lr.ConstantLR(o, 0.5), lr.PolynomialLR(o, 5)]), lr.StepLR(o, 2)],
            [4],
        )
    ],
    "SWALR": lambda o: [torch.optim.swa_utils.SWALR(o, swa_lr=[0.05, 0.02], anneal_epochs=4)],
    "two of them": lambda o: [lr.StepLR(o, 3), lr.ExponentialLR(o, 0.9)],
}


def course(factor, make, cls=torch.optim.SGD, **options):
    """Return every group's learning rate at every step, scaled by ``factor`` before the first."""
    one = optimizer(cls, **options)
    schedulers = make(one)
    rates.scale(one, schedulers, factor)
    seen = []
    for _ in range(STEPS):
        seen.append([float(group["lr"]) for group in one.param_groups])
        one.step()
        for scheduler in schedulers:
            scheduler.step()
    return torch.tensor(seen)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_rate_of_the_schedule_is_multiplied(name):
    torch.testing.assert_close(course(4, SCHEDULERS[name]), 4 * course(1, SCHEDULERS[name]))


def test_reduce_on_plateau_keeps_its_floor_in_proportion():
    def floor(factor):
        one = optimizer()
        plateau = lr.ReduceLROnPlateau(one, factor=0.1, patience=0, min_lr=[0.02, 0.001])
        rates.scale(one, [plateau], factor)
        for _ in range(STEPS):
            plateau.step(1.0)
        return [group["lr"] for group in one.param_groups]

    assert floor(1) == pytest.approx([0.02, 0.001])
    assert floor(4) == pytest.approx([0.08, 0.004])


def test_a_rate_that_is_a_tensor_is_scaled_in_place():
    rate = torch.tensor(0.5)
    one = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=rate, capturable=False, foreach=False)
    rates.scale(one, [], 4)
    assert one.param_groups[0]["lr"] is rate
    assert float(rate) == 2.0


def test_a_tensor_that_groups_share_is_scaled_once():
    """Groups without a rate share the optimizer's tensor, also with its defaults."""
    rate = torch.tensor(0.5)
    one = torch.optim.Adam(
        [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(3)], lr=rate, foreach=False
    )
    assert all(group["lr"] is rate for group in one.param_groups)
    rates.scale(one, [], 4)
    assert all(group["lr"] is rate for group in one.param_groups)
    assert float(rate) == 2.0
    rates.scale(one, [], 2)
    assert float(rate) == 1.0


def test_a_group_that_is_added_later_gets_the_scaled_default():
    """For example when layers are unfrozen. A group that has a rate keeps it."""
    one = optimizer()
    rates.scale(one, [], 4)
    rates.scale(one, [], 4)
    one.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    one.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.3})
    assert [group["lr"] for group in one.param_groups] == pytest.approx([0.4, 0.04, 2.0, 0.3])


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_a_resumed_run_does_not_scale_the_default_twice(rate):
    """A checkpoint contains scaled groups, of any number of workers, and no defaults."""

    def fresh(rate):
        return torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=rate, foreach=False)

    saved, one = fresh(0.5), fresh(rate.clone() if isinstance(rate, torch.Tensor) else rate)
    rates.scale(saved, [], 2)
    rates.scale(one, [], 4)  # as set-up does before it reads a checkpoint
    one.load_state_dict(saved.state_dict())
    assert rates.scale(one, [], 4) == 2
    one.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert [float(group["lr"]) for group in one.param_groups] == pytest.approx([2.0, 2.0])


def test_an_optimizer_that_is_returned_again_is_not_scaled_twice():
    one = optimizer()
    rates.scale(one, [], 4)
    rates.scale(one, [], 4)
    assert [group["lr"] for group in one.param_groups] == pytest.approx([0.4, 0.04])
    rates.scale(one, [], 1)
    assert [group["lr"] for group in one.param_groups] == pytest.approx([0.1, 0.01])


def test_a_state_that_was_saved_scaled_is_not_scaled_twice():
    """For example when a Session's loop reads the state before ``setup``.

    With another number of workers the rates follow that number.
    """
    saved, one = optimizer(), optimizer()
    rates.scale(saved, [], 4)
    one.load_state_dict(saved.state_dict())
    assert rates.scale(one, [], 4) == 4
    assert [group["lr"] for group in one.param_groups] == pytest.approx([0.4, 0.04])
    assert rates.scale(one, [], 2) == 4
    assert [group["lr"] for group in one.param_groups] == pytest.approx([0.2, 0.02])


def test_schedulers_of_another_optimizer_are_left_alone():
    mine, other = optimizer(), optimizer()
    theirs = lr.StepLR(other, 3)
    rates.scale(mine, [lr.StepLR(mine, 3), theirs], 4)
    assert theirs.base_lrs == [0.1, 0.01]
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.01]


@pytest.mark.horovod
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("case", "factors"),
    [
        ("average", [1] * 3),
        ("scaled", [3] * 3),
        ("scaled in a process set", [2, 1, 2]),
        ("scaled sum", [1] * 3),
    ],
)
def test_rates_are_multiplied_by_the_number_of_workers(three_ranks, case, factors):
    """A rank outside the process set counts as one worker."""
    for kept, factor in zip(three_ranks, factors, strict=True):
        assert kept[case]["lr"] == pytest.approx([0.1 * factor])


@pytest.mark.horovod
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", ["apart", "distributed optimizer, apart"])
def test_every_rank_starts_with_rank_0s_optimizer(three_ranks, case):
    for kept in three_ranks:
        assert kept[case]["lr"] == [0.1]
        (states,) = kept[case]["state"]
        assert len(states) == 6
        for state in states:
            assert float(state["step"]) == 7.0
            assert bool((state["exp_avg"] == 0.25).all())
        assert torch.equal(
            kept[case]["ended"]["last.weight"], three_ranks[0][case]["ended"]["last.weight"]
        )


@pytest.mark.horovod
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["kept", "aside"])
def test_every_rank_starts_with_rank_0s_buffers(three_ranks, name):
    """Before the first step: at the end of an epoch all buffers become rank 0's anyway."""
    for kept in three_ranks:
        assert kept["buffers"]["started"][name].tolist() == [0.0, 0.0]


@pytest.mark.horovod
@pytest.mark.timeout(400)
def test_an_empty_state_stays_empty_and_no_step_is_taken(three_ranks):
    """Horovod's broadcast_optimizer_state would take a step, in which AdamW decays every weight."""
    started = three_ranks[0]["average"]["started"]
    for kept in three_ranks:
        assert kept["fresh"]["state"] == [[]]
        assert all(
            torch.equal(kept["fresh"]["started"][name], value) for name, value in started.items()
        )
