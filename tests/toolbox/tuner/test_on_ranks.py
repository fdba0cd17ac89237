"""The finders on two ranks: equal results, a common end, and no changes."""

import pytest
import torch
from regression import Net, samples, weights
from threads import equal, on_threads
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.tuning import Tuner


def find(module, **options):
    trainer, strategy = on_threads()
    curve = Tuner(trainer).lr_find(
        module, DataLoader(samples(), batch_size=4), min_lr=1e-4, num_training=30, **options
    )
    return curve, strategy


def test_the_curve_equals_that_of_one_process_on_all_the_data():
    """Two ranks with batches of 4 see the same samples as one process with batches of 8."""

    class Lr(Net):
        lr = 0.5

    module = Lr()
    curve, _ = find(module)
    assert module.lr == curve.suggestion()
    assert len(curve.lrs) == 30
    alone = Net()
    optimizer, losses = torch.optim.SGD(alone.parameters(), lr=1.0), []
    for (x, y), lr in zip(list(DataLoader(samples(), batch_size=8)) * 5, curve.lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(alone(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert curve.raw_losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(
    ("rank", "factor", "steps", "why"),
    [(0, float("nan"), 20, "the loss was nan"), (1, 1e4, 21, "the loss diverged")],
)
def test_a_bad_loss_on_one_rank_ends_both_in_the_same_step(rank, factor, steps, why):
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * factor if self.global_rank == rank and self.global_step >= 20 else loss

    curve, _ = find(Breaks(), update_attr=False)
    assert len(curve.lrs) == steps
    assert why in curve.stopped


@pytest.mark.parametrize("fails", [False, True])
def test_a_finder_leaves_no_changes(fails):
    class Own(Net):
        def training_step(self, batch, batch_idx):
            if fails and self.global_rank == 1 and self.global_step == 3:
                raise ValueError("in the finder")
            return super().training_step(batch, batch_idx)

    module, (trainer, _) = Own(norm=True, optimizer="adam"), on_threads(seed=3)
    before = weights(module)
    try:
        Tuner(trainer).lr_find(
            module,
            DataLoader(samples(), batch_size=4),
            min_lr=0.1,
            num_training=20,
            update_attr=False,
        )
    except ValueError:
        assert fails
    else:
        assert not fails
    assert equal(module.state_dict(), before)
    assert trainer.global_step == 0


def test_training_afterwards_is_bit_equal_to_training_without():
    def train(tune):
        module, (trainer, strategy) = (
            Net(norm=True, optimizer="adam"),
            on_threads(max_epochs=2, seed=3),
        )
        data = DataLoader(samples(), batch_size=4, shuffle=True)
        if tune:
            Tuner(trainer).lr_find(module, data, num_training=20, update_attr=False)
        trainer.fit(module, data)
        return [weights(run.module) for run in strategy.runs], torch.rand(1).item()

    (without, drawn), (after, also) = train(False), train(True)
    assert drawn == also
    assert all(map(equal, without, after))


def test_a_batch_size_is_found_in_one_process_only():
    class Own(Net):
        batch_size = 2

    trainer, _ = on_threads()
    with pytest.raises(
        gt.UsageError, match=r"ThreadRanks trains in 2 processes.*Fix: find it on one device"
    ):
        Tuner(trainer).scale_batch_size(Own())
