"""Losses with weights: gradients equal those of one batch with the samples of all ranks."""

import pytest
import torch
from small_models import fit
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import TrainingError
from geartrain.testing import ThreadRanks

SAMPLES = 24


def _samples():
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=draws)
    return [(x[i], i) for i in range(SAMPLES)]


def count(numbers):
    """Return the tokens in each sample: 0 to 4."""
    return numbers * 7 % 5


class Weighted(gt.Module):
    """Records the gradients and the loss of each step."""

    def __init__(self, weight=float, closure=False, none=()):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1).double()
        self.weight, self.closure, self.none = weight, closure, none
        self.gradients = []

    def training_step(self, batch, batch_idx):
        if batch_idx in self.none:
            return None
        x, number = batch
        tokens = count(number)
        loss = (self.net(x).flatten().sin() * tokens).sum()
        weight = self.weight(tokens.sum())
        return {"loss": loss} if weight is None else {"loss": loss, "weight": weight}

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append([p.grad.clone() for p in self.parameters()])

    def configure_optimizers(self):
        if self.closure:
            return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class OfOneBatch(Weighted):
    """The mean over all tokens of a batch, without weights."""

    def training_step(self, batch, batch_idx):
        x, number = batch
        tokens = count(number)
        return (self.net(x).flatten().sin() * tokens).sum() / tokens.sum().clamp(min=1)


def train(module, ranks=1, batch=2, **options):
    strategy = ThreadRanks(ranks) if ranks > 1 else "single"
    fit(module, DataLoader(_samples(), batch), strategy=strategy, devices=ranks, **options)
    return strategy


def assert_same(module, expected):
    assert len(module.gradients) == len(expected.gradients) > 0
    for ours, theirs in zip(module.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        dict(module.named_parameters()), dict(expected.named_parameters()), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    ("ranks", "accumulate", "options"),
    [(1, 1, {}), (1, 4, {"gradient_clip_val": 0.05}), (2, 1, {}), (2, 4, {}), (3, 1, {})],
)
def test_gradients_equal_those_of_one_batch(ranks, accumulate, options):
    weighted, one = Weighted(), OfOneBatch()
    train(weighted, ranks, 1, accumulate_grad_batches=accumulate, **options)
    train(one, 1, ranks * accumulate, **options)
    assert_same(weighted, one)


@pytest.mark.parametrize(
    "weight",
    [int, lambda w: w.half(), lambda w: w.reshape(1)],
    ids=["int", "float16", "one element"],
)
def test_a_weight_is_any_number(weight):
    weighted, one = Weighted(weight), OfOneBatch()
    train(weighted, accumulate_grad_batches=3)
    train(one, 1, 6)
    assert_same(weighted, one)


@pytest.mark.parametrize("none", [(0,), (3,), (0, 1, 2, 3)], ids=["first", "last", "all"])
def test_skipped_batches_count_nothing(none):
    weighted, one = Weighted(none=none), OfOneBatch()
    train(weighted, accumulate_grad_batches=4, limit_train_batches=8)
    left = [sample for i, sample in enumerate(_samples()) if i // 2 not in none]
    for window in (left[: 8 - 2 * len(none)], left[8 - 2 * len(none) : 16 - 2 * len(none)]):
        if window:
            loader = DataLoader(window, len(window))
            fit(one, loader, limit_train_batches=1)
            break
    torch.testing.assert_close(weighted.gradients[0], one.gradients[0], rtol=1e-9, atol=1e-12)
    assert len(weighted.gradients) == (1 if len(none) == 4 else 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closure_gets_the_mean_loss(ranks):
    weighted, one = Weighted(closure=True), OfOneBatch(closure=True)
    train(weighted, ranks, 1, accumulate_grad_batches=4)
    train(one, 1, ranks * 4)
    assert_same(weighted, one)


def test_a_step_that_counts_nothing_has_gradients_of_zero():
    module = Weighted(lambda w: 0 * w)
    train(module, 2, accumulate_grad_batches=2, limit_train_batches=2)
    assert all(not gradient.any() for gradient in module.gradients[0])


def test_gradients_of_a_scaled_loss_equal_those_of_one_batch():
    weighted, one = Weighted(), OfOneBatch()
    train(weighted, 2, 1, accumulate_grad_batches=2, precision="16-mixed")
    train(one, 1, 4)
    for ours, theirs in zip(weighted.gradients, one.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "2", True, None, torch.ones(2)])
def test_other_weights_are_refused(weight):
    module = Weighted()
    module.training_step = lambda batch, batch_idx: {
        "loss": module.net(batch[0]).sum(),
        "weight": weight,
    }
    with pytest.raises(TrainingError, match=r"weight .* which is not .*\. Fix: return"):
        train(module)


@pytest.mark.parametrize(("first", "ranks"), [(True, 1), (False, 2)])
def test_every_loss_has_a_weight_or_none(first, ranks):
    given = iter([first, first, not first] * ranks)
    module = Weighted()
    module.weight = lambda tokens: tokens if next(given) else None
    with pytest.raises(TrainingError, match=r"losses had .* weight\. Fix"):
        train(module)


@pytest.mark.parametrize(("which", "accumulate"), [(0, 2), (1, 1)])
def test_weights_on_some_ranks_are_refused(which, accumulate):
    class Module(Weighted):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            return output if self.trainer.global_rank == which else output["loss"]

    with pytest.raises(TrainingError, match=rf"ranks \[{which}\] have weights"):
        train(Module(), 2, accumulate_grad_batches=accumulate)


def test_a_strategy_without_the_mean_over_ranks_refuses_weights():
    strategy = ThreadRanks(2)
    strategy.capabilities = {**strategy.capabilities, "weighted_loss": False}
    loader = DataLoader(_samples(), 2)
    with pytest.raises(TrainingError, match=r"does not support 'weight'.* Fix: return the mean"):
        fit(Weighted(), loader, strategy=strategy, devices=2)
    fit(OfOneBatch(), loader, strategy=strategy, devices=2)


def test_ranks_agree_once_if_losses_have_no_weights():
    """With several ranks a step with weights has one more collective than one without."""

    class Counting(ThreadRanks):
        calls = 0

        @gt.hookimpl
        def log_sync(self, run, values):
            self.calls += len(values) == 2 and run.world.rank == 0 and run.batch is not None
            return super().log_sync(run, values)

    for module, calls in ((OfOneBatch(), 1), (Weighted(), 1 + 6)):
        strategy = Counting(2)
        fit(module, DataLoader(_samples(), 2), strategy=strategy, devices=2)
        assert strategy.calls == calls


def test_manual_optimisation_refuses_a_weight():
    class Module(Weighted):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(TrainingError, match=r"manual optimisation does not use\. Fix: divide"):
        train(Module())
