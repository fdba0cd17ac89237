"""PowerSGD on two ranks with many buckets equals the paper's algorithm in one process."""

import re

import pytest
import torch
from several_ranks import kept_by
from torch.utils.data import DataLoader

from geartrain import Trainer, UsageError
from geartrain_bagua import BaguaStrategy
from geartrain_bagua.algorithms.power_sgd import PowerSGD

from . import reference_power_sgd as reference
from .cases import Net, one_trainer, samples
from .power_sgd_cases import (
    BATCH,
    CASES,
    LEARNING_RATE,
    STEPS,
    Model,
    data,
    loss_of,
    net,
    train_each_case,
)

RANKS = 2
found = kept_by(train_each_case)


def by_hand(approximate, steps=range(STEPS), weights=None):
    """Train both ranks in this process; return the weights.

    Args:
        approximate: makes one gradient from the two ranks' gradients.
        steps: the steps to train.
        weights: the weights to start from.
    """
    model, (x, y) = net(), data().tensors
    model.load_state_dict(weights or {}, strict=weights is not None)
    named = dict(model.named_parameters())
    for step in steps:
        gradients = {f"net.{name}": [] for name in named}
        for rank in range(RANKS):
            part = slice(2 * BATCH * step + rank, 2 * BATCH * (step + 1), RANKS)
            made = torch.autograd.grad(loss_of(model, (x[part], y[part])), list(named.values()))
            for name, gradient in zip(named, made, strict=True):
                gradients[f"net.{name}"].append(gradient)
        approximations = approximate(gradients)
        with torch.no_grad():
            for name, parameter in named.items():
                parameter -= LEARNING_RATE * approximations[f"net.{name}"]
    return {name: value.clone() for name, value in model.state_dict().items()}


def mean(gradients):
    return {name: sum(of_ranks) / RANKS for name, of_ranks in gradients.items()}


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("case", "rank"), [("rank 2", 2), ("rank 1", 1), ("one bucket", 2)])
def test_trains_as_the_papers_algorithm(found, case, rank):
    close(found[0][case]["weights"], by_hand(reference.PowerSGD(rank)))


def test_is_an_approximation(found):
    exact, got = by_hand(mean), found[0]["rank 1"]["weights"]
    assert not torch.allclose(got["2.weight"], exact["2.weight"], rtol=1e-3)


@pytest.mark.parametrize("case", [*CASES, "resumed"])
def test_ranks_have_the_same_weights(found, case):
    for name, weights in found[0][case]["weights"].items():
        assert torch.equal(weights, found[1][case]["weights"][name])


def test_each_rank_keeps_its_own_error_for_the_next_step(found):
    expected = reference.PowerSGD(2)
    by_hand(expected)
    for rank in range(RANKS):
        low = found[rank]["rank 2"]["state"]["low"]
        names = {"net.0.weight", "net.2.weight", "net.4.weight"}
        assert low.keys() == expected.errors.keys() == names
        for name, kept in low.items():
            close(kept["error"], expected.errors[name][rank])
            close(kept["q"], expected.q[name])
            assert kept["error"].abs().max() > 1e-6


def test_warm_up_is_exact(found):
    close(found[0]["all warm-up"]["weights"], by_hand(mean))
    assert found[0]["all warm-up"]["state"]["steps"] == STEPS
    after = by_hand(mean, range(3))
    close(found[0]["warm-up"]["weights"], by_hand(reference.PowerSGD(2), range(3, STEPS), after))


def test_a_step_sends_thin_matrices_and_the_rest(found):
    thin = sum((rows + columns) * 2 for rows, columns in [(8, 36), (20, 72), (9, 20)])
    rest = 8 + 20 + 9 + 2 + 2 * 9
    assert sum(found[0]["rank 2"]["sent"]) == STEPS * (thin + rest)
    whole = sum(parameter.numel() for parameter in net().parameters())
    assert sum(found[0]["all warm-up"]["sent"]) == STEPS * whole
    assert len(found[0]["rank 2"]["sent"]) > 4 * STEPS  # many buckets


def test_resumes_from_its_state(found):
    for rank in range(RANKS):
        assert found[rank]["resumed"]["state"]["steps"] == STEPS
        close(found[rank]["resumed"]["weights"], found[rank]["rank 2"]["weights"])
        close(found[rank]["resumed"]["state"]["low"], found[rank]["rank 2"]["state"]["low"])


def test_errors_are_dropped_if_the_number_of_ranks_changes(found):
    whole = reference.PowerSGD(2)
    half = by_hand(whole, range(STEPS // 2))
    whole.errors = {
        name: [torch.zeros_like(error) for error in errors] for name, errors in whole.errors.items()
    }
    close(found[0]["resumed elsewhere"]["weights"], by_hand(whole, range(STEPS // 2, STEPS), half))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"matrix_rank": 0}, "matrix_rank=0 must be 1 or more"),
        ({"min_compression_rate": 0.5}, "min_compression_rate=0.5 must be 1 or more"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be 0 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(options, error):
    with pytest.raises(UsageError, match=re.escape(error)):
        BaguaStrategy(algorithm="power_sgd", **options)


def test_a_closure_that_is_evaluated_several_times_is_one_step_of_the_warm_up():
    strategy = BaguaStrategy(algorithm="power_sgd", warmup_steps=5)
    one_trainer(devices=1, strategy=strategy, max_steps=2).fit(
        Net(optimizer="lbfgs"), DataLoader(samples(), batch_size=8)
    )
    assert strategy.algorithm.state_dict()["steps"] == 2


def test_16_mixed_is_refused_before_the_start():
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BaguaStrategy(algorithm=PowerSGD()),
        precision="16-mixed",
        max_epochs=1,
    )
    with pytest.raises(
        UsageError, match=r"scaler of precision 16-mixed.*Fix: precision='bf16-mixed'"
    ):
        trainer.fit(Model(), [])
