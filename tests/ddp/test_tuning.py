"""The finders under ddp; tests/toolbox/tuner/test_on_ranks.py has their results on ranks."""

import json

from several_ranks import succeeded
from torch.utils.data import DataLoader

import geartrain as gt

from .cases import Net, samples


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
