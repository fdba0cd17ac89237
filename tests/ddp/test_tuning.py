"""The finders under ddp; tests/toolbox/tuner/test_on_ranks.py has their results on ranks."""

import json

import pytest
from several_ranks import succeeded
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.tuning import Tuner

from .cases import Net, ddp, samples


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


class Limited(Net):
    batch_size = 2

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=self.batch_size)

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 11:
            raise MemoryError("no room")
        return super().training_step(batch, batch_idx)


@pytest.mark.end_to_end
def test_a_batch_size_is_found_by_ddp_on_one_device():
    module, trainer = Limited(), ddp(devices=1)
    assert Tuner(trainer).scale_batch_size(module, mode="binsearch") == 11
    trainer.fit(module)
