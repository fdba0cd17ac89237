"""The finders on two ranks find the same value, end together and restore the module."""

import json

import pytest
import torch
from several_ranks import failed, kept_by, succeeded
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.tuning import Tuner

from .cases import Net, ddp, one_trainer, samples, weights


class Breaks(Net):
    """The loss becomes large or NaN in step 21 on one rank."""

    def __init__(self, rank, factor):
        super().__init__()
        self.rank, self.factor = rank, factor

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return (
            loss * self.factor if self.global_rank == self.rank and self.global_step >= 20 else loss
        )


class Lr(Net):
    lr = 0.5


def find(module, **options):
    tuner = Tuner(ddp(**options))
    return tuner.lr_find(
        module,
        DataLoader(samples(), batch_size=4),
        min_lr=1e-4,
        num_training=30,
        update_attr=hasattr(module, "lr"),
    )


def train(tune):
    module, trainer = Net(norm=True, optimizer="adam"), ddp(max_epochs=2, seed=3)
    data = DataLoader(samples(), batch_size=4, shuffle=True)
    before = weights(module)
    if tune:
        Tuner(trainer).lr_find(module, data, num_training=20, update_attr=False)
        assert all(torch.equal(value, before[name]) for name, value in weights(module).items())
        assert trainer.global_step == 0
    trainer.fit(module, data)
    return weights(module), torch.rand(1).item()


def find_and_train():
    found, module = {}, Lr()
    found["curve"] = find(module)
    found["set"] = module.lr
    for rank in (0, 1):
        found[f"nan on {rank}"] = find(Breaks(rank, float("nan")))
        found[f"large on {rank}"] = find(Breaks(rank, 1e4))
    found["without"], found["after"] = train(False), train(True)
    return found


found = kept_by(find_and_train)


def test_both_ranks_find_the_same(found):
    first, second = found
    assert first["curve"] == second["curve"]
    assert first["set"] == second["set"] == first["curve"].suggestion()
    assert len(first["curve"].lrs) == 30


def test_the_curve_is_that_of_one_process_on_all_the_data(found):
    """Two ranks with batches of 4 get the samples of one process with batches of 8."""
    module = Net()
    batches = list(DataLoader(samples(), batch_size=8)) * 5
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=1.0), []
    for (x, y), lr in zip(batches, found[0]["curve"].lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found[0]["curve"].raw_losses == pytest.approx(losses, rel=1e-4)


def test_a_bad_loss_on_one_rank_ends_both_in_the_same_step(found):
    for rank in found:
        for bad in (0, 1):
            broken, large = rank[f"nan on {bad}"], rank[f"large on {bad}"]
            assert len(broken.lrs) == 20
            assert "the loss was nan" in broken.stopped
            assert len(large.lrs) == 21
            assert "the loss diverged" in large.stopped
    assert all(found[0][name] == found[1][name] for name in found[0] if " on " in name)


def test_training_afterwards_is_bit_equal_to_training_without(found):
    for rank in found:
        (without, drawn), (after, also) = rank["without"], rank["after"]
        assert drawn == also
        assert all(torch.equal(value, after[name]) for name, value in without.items())


class Data(gt.DataModule):
    def train_dataloader(self):
        return DataLoader(samples(), batch_size=4)


def tune_from_the_command_line():
    options = {
        "accelerator": "cpu",
        "strategy": "ddp",
        "devices": 2,
        "num-training": 20,
        "min-lr": 1e-3,
        "output": "out",
    }
    gt.cli(
        Net,
        Data,
        argv=["tune", "lr", *(f"--{name}={value}" for name, value in options.items()), "--json"],
    )


def test_only_rank_0_of_the_command_prints(tmp_path):
    first, second = succeeded(tmp_path, tune_from_the_command_line)
    assert first.printed.count('"suggestion"') == 1
    assert second.printed == ""
    assert json.loads((tmp_path / "out" / "lr.json").read_text())["suggestion"] > 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"lr.json", "lr.csv"}


class Bad(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 3:
            raise ValueError("in the finder")
        return super().training_step(batch, batch_idx)


def fail_in_the_finder():
    module = Bad()
    before = weights(module)
    try:
        Tuner(ddp()).lr_find(
            module, DataLoader(samples(), batch_size=4), min_lr=0.1, update_attr=False
        )
    except Exception as error:
        after = weights(module)
        same = all(torch.equal(value, before[name]) for name, value in after.items())
        raise RuntimeError(f"as before: {same}") from error


def test_an_error_on_one_rank_ends_the_finder_on_both_and_is_undone(tmp_path):
    first, second = failed(tmp_path, fail_in_the_finder)
    assert first.error == second.error == "RuntimeError: as before: True"
    assert "ValueError: in the finder" in second.printed


def test_a_batch_size_is_found_in_one_process_only():
    class Starts(Net):
        batch_size = 2

        def setup(self, stage):
            raise AssertionError("something was started")

    with pytest.raises(
        gt.UsageError,
        match=r"\[ddp\] trains in 2 processes.*"
        r"Fix: find it on one device \(--strategy single --devices 1\)",
    ):
        Tuner(one_trainer(devices=2, strategy="ddp")).scale_batch_size(Starts())


class Own(Net):
    batch_size = 2

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=self.batch_size)

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 11:
            raise MemoryError("no room")
        return super().training_step(batch, batch_idx)


def test_a_batch_size_is_found_by_ddp_on_one_device():
    module, trainer = Own(), ddp(devices=1)
    before = weights(module)
    assert Tuner(trainer).scale_batch_size(module, mode="binsearch") == 11
    assert all(torch.equal(value, before[name]) for name, value in weights(module).items())
    trainer.fit(module)
