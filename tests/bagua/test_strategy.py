"""The strategy bagua: two ranks train as one process, the order of an algorithm's calls, errors."""

import re
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from several_ranks import kept_by
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_bagua import Algorithm, BaguaStrategy
from geartrain_bagua.algorithms.gradient_allreduce import GradientAllReduce

from .cases import CASES, Net, bagua, one_trainer, samples, train
from .strategy_cases import (
    average_in_a_thread,
    communicate_while_computing,
    flat,
    layers,
    start_apart_and_overflow,
    train_in_loops_of_the_user,
    watch_the_calls,
)


def train_all():
    """Return the loss curve and the weights of each case."""
    return {name: train(name, ranks=2)[1:] for name in CASES}


two_ranks = kept_by(train_all)


@cache
def one_process(name):
    _, curve, weights = train(name)
    return curve, weights


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(two_ranks, name):
    curve, weights = one_process(name)
    theirs, trained = two_ranks[0][name]
    assert len(curve) > 1
    assert theirs == pytest.approx(curve, rel=1e-5)
    # LBFGS divides by small differences of gradients, which makes rounding larger.
    rtol, atol = (1e-4, 1e-5) if name == "lbfgs" else (1e-5, 1e-6)
    for key, expected in weights.items():
        torch.testing.assert_close(trained[key], expected, rtol=rtol, atol=atol)
        assert torch.equal(trained[key], two_ranks[1][name][1][key]), f"{key} differs between ranks"


# --- results of strategy_cases.py -----------------------------------------------------------------

apart = kept_by(start_apart_and_overflow)
watched = kept_by(watch_the_calls)
overlapping = kept_by(communicate_while_computing)
averaged_in_a_thread = kept_by(average_in_a_thread)
loops_of_the_user = kept_by(train_in_loops_of_the_user)


@pytest.mark.parametrize("only_rank_1", [False, True])
def test_ranks_start_from_the_same_optimizers(apart, only_rank_1):
    assert torch.equal(*(kept["apart", only_rank_1] for kept in apart))


def test_mixed_precision_scales_reduces_unscales_and_clips(apart):
    (trained, before), (theirs, _) = (kept["16-mixed"] for kept in apart)
    assert torch.equal(trained, theirs)
    # 12 steps with a gradient norm of at most 0.001: unscaled before they are clipped (the scale is
    # 65,536).
    assert 0 < (trained - before).norm() <= 12 * 0.1 * 0.001 * 1.001


def test_an_overflow_on_one_rank_skips_the_step_on_all(apart):
    (skipped, mine), (also, theirs) = (kept["skipped"] for kept in apart)
    assert skipped == also == 1
    assert torch.equal(mine, theirs)


def test_an_algorithm_is_called_in_the_order_of_a_step(watched):
    for rank, kept in enumerate(watched):
        begin, *calls = kept["calls"]
        assert begin == ("set_up", 3, (0, 1), rank)
        first = ["start_step", "computing", "batch", "end of batch", "batch"]
        second = ["computed", "computing", "end of batch", "batch"]
        third = ["computed", "computing", 0, 1, 2, "end_backward"]
        end = ["optimizer", "optimizer", "end of batch", "computed", "end_step"]
        plugins = ["computing", "on_step_end", "computed"]
        step = [*first, *second, *third, *end, *plugins]
        # The sanity check, three batches of 8 samples in one step, and one pause for validation and
        # the epoch's checkpoint.
        assert calls == ["pause", "resume", *step, "pause", ("close", False)]
        assert kept["threads"] == {"geartrain-bagua"}
        assert kept["state"] == {"algorithm": "Watched", "state": {"n": 3}}


def test_a_closure_is_one_step_of_several_backwards(watched):
    calls = watched[0]["calls of lbfgs"][1:-1]
    evaluation = [0, 1, 2, "end_backward"]
    before, after = ["start_step", "computing"], ["computed", "end_step", "computing", "computed"]
    assert calls == [*before, *evaluation * 4, *after]


def test_a_run_leaves_no_thread_group_or_context(watched):
    for kept in watched:
        assert kept["left"] == ([], False, False)


def test_communication_overlaps_with_backward(overlapping):
    assert [kept["overlapped"] for kept in overlapping] == [[True] * 3] * 2


def test_decentralized_exchanges_from_before_forward_to_after_backward(overlapping):
    for kept in overlapping:
        assert kept["early"] == [("exchange has begun", True), ("training has continued", True)]


def test_asyncs_thread_has_its_own_group_and_ends_with_each_fit(averaged_in_a_thread):
    for kept in averaged_in_a_thread:
        assert kept["groups"] == [False, (0, 1)]
        assert kept["threads"] == [["geartrain-bagua", "geartrain-bagua-async"]] * 6
        assert kept["leaks"] == [[], []]


def test_async_pauses_if_a_plugin_saves_a_checkpoint_in_on_step_end(averaged_in_a_thread):
    first, second = (kept["saved in on_step_end"] for kept in averaged_in_a_thread)
    assert len(first) == 2
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)


def test_manual_optimisation_averages(loops_of_the_user):
    _, weights = one_process("sgd")
    expected = torch.cat([value.flatten() for value in weights.values()])
    for kept in loops_of_the_user:
        torch.testing.assert_close(kept["manual"], expected, rtol=1e-5, atol=1e-6)


def test_a_session_averages_once_per_step(loops_of_the_user):
    model, (x, y) = layers(), samples().tensors
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(0, len(x), 8):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[i : i + 8]), y[i : i + 8]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    for kept in loops_of_the_user:
        torch.testing.assert_close(kept["session"], flat(model), rtol=1e-5, atol=1e-6)


# --- errors, on one rank, which has the same errors as several ------------------------------------


def refused(module, **options):
    with pytest.raises(gt.GeartrainError) as caught:
        bagua(1, **options).fit(module, DataLoader(samples(), 8))
    return str(caught.value)


def test_unused_parameters_are_named():
    error = refused(Net(unused=True))
    assert "]: rank 0 did not use these parameters in a step: extra.weight, extra.bias. " in error
    assert "Fix: --strategy.find_unused_parameters true" in error


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("gradient_allreduce", "]: rank 0: first.weight got a gradient, but needed none when"),
        ("decentralized", "]: rank 0: first.weight needs a gradient, but needed none when"),
        ("low_precision_decentralized", "]: rank 0: first.weight needs a gradient"),
        ("async", "]: rank 0: first.weight needs a gradient"),
    ],
)
def test_a_parameter_that_is_unfrozen_later_is_named(algorithm, words):
    class Unfreezes(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.first.requires_grad_(True)

    error = refused(Unfreezes(frozen=True), strategy={"algorithm": algorithm})
    assert words in error
    assert "Fix: " in error


def test_a_second_backward_is_refused():
    class Twice(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss.backward(retain_graph=True)
            return loss

    error = refused(Twice())
    assert re.search(r"]: rank 0: \S+ got its gradient twice in one step", error)


def zero(gradient):
    return gradient.zero_()


class Changes(Net):
    """Changes gradients after backward; two of its gradients are views of one tensor."""

    def __init__(self, change=zero, of=(), **options):
        super().__init__(**options)
        self.change, self.of = change, of
        self.pair = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(32)) for name in ("upper", "lower")}
        )

    def training_step(self, batch, batch_idx):
        pair = torch.cat([self.pair.upper, self.pair.lower])
        return super().training_step(batch, batch_idx) + pair.square().sum()

    def on_after_backward(self):
        for name in self.of:
            parameter = self.get_parameter(name)
            parameter.grad = self.change(parameter.grad)


@pytest.mark.parametrize(
    "name",
    ["last.weight", "first.bias", "pair.upper"],
    ids=["an early one", "of the last bucket", "a view"],
)
@pytest.mark.parametrize("change", [zero, torch.zeros_like], ids=["in place", "another"])
def test_a_gradient_that_is_changed_after_it_was_sent_is_named(name, change):
    """The bucket overwrites the gradient, so the change would be lost."""
    error = refused(Changes(change, [name]), strategy={"bucket_bytes": 100})
    assert f"]: rank 0: the gradient of {name} was changed after it was sent" in error
    assert "Fix: change gradients in on_before_optimizer_step" in error


@pytest.mark.parametrize("accumulate", [1, 3])
def test_unchanged_gradients_are_accepted(accumulate):
    bagua(1, accumulate_grad_batches=accumulate, strategy={"bucket_bytes": 100}).fit(
        Changes(), DataLoader(samples(), 8)
    )


def test_a_gradient_that_is_changed_before_it_is_sent_is_averaged_with_the_change():
    class Early(Net):
        def on_after_backward(self):
            if self.accumulated == 1:
                zero(self.last.weight.grad)

        def on_train_batch_start(self, batch, batch_idx):
            self.accumulated = batch_idx % 2 + 1

    def trained(**options):
        module = Early()
        one_trainer(accumulate_grad_batches=2, max_steps=2, **options).fit(
            module, DataLoader(samples(), 8)
        )
        return flat(module)

    torch.testing.assert_close(trained(strategy="bagua", devices=1), trained(devices=1))


class Other(Algorithm):
    """An algorithm that ``average_gradients`` cannot replace."""


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (BaguaStrategy(Other), "'Other'"),
        (BaguaStrategy(hierarchical=True), "'gradient_allreduce'"),
        (BaguaStrategy(average=False), ""),
    ],
    ids=["another", "hierarchical", "summed"],
)
def test_manual_optimisation_and_a_session_are_refused_if_core_averages_differently(strategy, name):
    class Manual(Net):
        automatic_optimization = False

    trainer = gt.Trainer(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(gt.UsageError, match=f"the algorithm {name}.*manual optimisation"):
        trainer.fit(Manual(), DataLoader(samples(), 8))
    with pytest.raises(gt.UsageError, match=f"the algorithm {name}.*a Session's own loop"):
        gt.Session(accelerator="cpu", devices=2, strategy=strategy).launch()


def test_manual_optimisation_does_not_call_an_algorithm_that_was_not_set_up():
    class Computes(GradientAllReduce):
        def computing(self):
            return nullcontext(self.context)

    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
            self.optimizers().step()

    trainer = one_trainer(strategy=BaguaStrategy(Computes), devices=1, accumulate_grad_batches=1)
    trainer.fit(Manual(), DataLoader(samples(), 8))
    assert trainer.global_step == 6


def test_a_state_of_another_algorithm_is_refused_by_name():
    strategy = BaguaStrategy()
    strategy.load_state_dict(strategy.state_dict())
    with pytest.raises(
        gt.UsageError,
        match="is of the algorithm 'bytegrad', and this run's is 'gradient_allreduce'",
    ):
        strategy.load_state_dict({"algorithm": "bytegrad", "state": {}})


def test_the_strategy_has_only_the_hooks_that_the_algorithm_needs():
    hooks = bagua(1).hooks
    for hook in ("step", "optimizer_step", "on_validation_start"):
        assert not any(choice.kind == "strategy" for choice in hooks.implementers(hook)), hook
    assert hooks.owner("micro_step").kind == hooks.owner("reduce_gradients").kind == "strategy"
    idle = gt.Trainer(accelerator="cpu", devices=1, strategy=BaguaStrategy(Other)).hooks
    assert idle.owner("micro_step").kind == idle.owner("reduce_gradients").kind == "default"


@pytest.mark.parametrize("method", ["configure_ddp", "ddp_device_ids"])
def test_a_subclass_with_a_method_that_is_never_called_is_refused(method):
    mine = type("Mine", (BaguaStrategy,), {method: lambda self, *_: None})
    with pytest.raises(gt.UsageError, match=rf"Mine\.{method} would never be called"):
        mine()


@pytest.mark.parametrize("algorithm", ["decentralized", "low_precision_decentralized", "async"])
def test_an_optimizer_with_a_closure_is_refused_if_weights_differ_between_ranks(algorithm):
    """The closure averages the loss over ranks, but ranks call it different numbers of times."""
    error = refused(Net(optimizer="lbfgs"), strategy={"algorithm": algorithm})
    assert "such as LBFGS" in error
    assert "Fix: use another optimizer" in error
