"""Mixed precision in manual optimisation.

16-mixed equals torch's scaler in a plain loop, and is also correct where torch's scaler is not.
"""

import copy

import pytest
import torch
from small_models import assert_equal, fit, loader
from torch import nn

from geartrain import TrainingError

from .manual import Two


def by_hand_16(module, batches, epochs=1, overflow=None):
    """Train with two optimizers in turn and torch's scaler, which is updated after both."""
    module = copy.deepcopy(module)
    optimizers, _ = module.configure_optimizers()
    scaler, skipped, scaled = torch.amp.GradScaler("cpu"), 0, []
    for _ in range(epochs):
        for batch_idx, batch in enumerate(batches):
            for optimizer in optimizers:
                module.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = module.loss(batch)
                scaler.scale(loss * (float("inf") if batch_idx == overflow else 1.0)).backward()
                scaled.append(module.a.weight.grad.clone())
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(
                    [p for group in optimizer.param_groups for p in group["params"]], 1e-3
                )
                before = [p.detach().clone() for p in module.parameters()]
                scaler.step(optimizer)
                skipped += all(
                    torch.equal(was, p) for was, p in zip(before, module.parameters(), strict=True)
                )
            scaler.update()
    return module, skipped, scaled


def test_a_forward_after_a_step_uses_the_new_weights_not_autocasts_copies():
    def train(module, batch, batch_idx):
        a, _ = module.optimizers()
        module.manual_backward(module.loss(batch))
        before = module.a(batch[0])
        a.step()
        assert not torch.equal(module.a(batch[0]), before)

    fit(Two(train), precision="bf16-mixed", limit_train_batches=1)


@pytest.mark.parametrize("overflow", [None, 1])
def test_gradients_are_unscaled_before_clipping_and_steps_that_overflow_are_skipped(overflow):
    def train(module, batch, batch_idx):
        for optimizer in module.optimizers():
            module.zero_grad()
            module.manual_backward(
                module.loss(batch) * (float("inf") if batch_idx == overflow else 1.0)
            )
            seen.append(module.a.weight.grad.clone())
            module.clip_gradients(optimizer, 1e-3)
            optimizer.step()

    module = Two(train)
    seen, (expected, skipped, scaled) = [], by_hand_16(module, loader(), overflow=overflow)
    one = fit(module, precision="16-mixed")
    assert_equal(module, expected)
    assert one.callback_metrics["skipped_steps"] == skipped == (0 if overflow is None else 2)
    # The scale is halved once, even if both steps of the batch overflowed.
    for found, same in zip(seen, scaled, strict=True):
        torch.testing.assert_close(found, same, rtol=0, atol=0, equal_nan=True)


def test_one_optimizer_may_step_several_times_per_batch_and_others_in_a_later_batch():
    """The scale is halved in between, and the gradients that wait are still correct."""
    seen = []

    class Looks(Two):
        def on_before_optimizer_step(self, optimizer):
            seen.append([p.grad.clone() for p in optimizer.param_groups[0]["params"]])

    def train(module, batch, batch_idx):
        a, b = module.optimizers()
        with module.toggled_optimizer(b):
            module.manual_backward(module.loss(batch))  # waits
        for _ in range(2):
            with module.toggled_optimizer(a):
                a.zero_grad()
                module.manual_backward(
                    module.loss(batch) * (float("inf") if batch_idx == 0 else 1.0)
                )
                a.step()
        if batch_idx == 1:
            b.step()
            b.zero_grad()

    module = Looks(train)
    before = copy.deepcopy(module)
    data = list(loader())[:2]
    fit(module, data, precision="16-mixed")
    assert len(seen) == 5
    expected = copy.deepcopy(before)
    with torch.autocast("cpu", torch.float16):
        # Both losses use a's initial weights: its steps in the first batch overflow, and in the
        # second batch it steps after b's backward.
        loss = expected.loss(data[0])
        loss = loss + expected.loss(data[1])
    loss.backward()
    for found, p in zip(seen[-1], expected.b.parameters(), strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-2, atol=1e-5)


def test_scaled_gradients_on_top_of_unscaled_ones_are_an_error_only_at_a_step():
    def forgets(module, batch, batch_idx):
        module.manual_backward(module.loss(batch))
        module.optimizers()[0].step()

    with pytest.raises(TrainingError, match=r"geartrain-callbacks\[16-mixed\].*SGD.*zero_grad"):
        fit(Two(forgets), precision="16-mixed")

    def leaves_a_trace(module, batch, batch_idx):
        a, b = module.optimizers()
        for optimizer in (a, b):  # b's loss adds to a's gradients, after a's step
            optimizer.zero_grad()
            module.manual_backward(module.loss(batch))
            optimizer.step()

    fit(Two(leaves_a_trace), precision="16-mixed")


@pytest.mark.parametrize("clear", ["set to none", "to zero", "by the module"])
def test_cleared_gradients_are_forgotten(clear):
    def train(module, batch, batch_idx):
        optimizer = module.optimizers()[0]
        module.zero_grad() if clear == "by the module" else optimizer.zero_grad(
            set_to_none=clear == "set to none"
        )
        module.manual_backward(module.loss(batch))
        optimizer.step()

    module = Two(train)
    one = fit(module, precision="16-mixed")
    assert one.callback_metrics["skipped_steps"] == 0


def test_a_step_with_a_closure_is_an_error():
    def train(module, batch, batch_idx):
        module.optimizers()[0].step(lambda: module.loss(batch))

    with pytest.raises(
        TrainingError,
        match=r"geartrain-callbacks\[16-mixed\] cannot skip steps that have a closure",
    ):
        fit(Two(train), precision="16-mixed")
