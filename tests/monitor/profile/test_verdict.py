"""The verdict names what is slow in programs that are slow in one way."""

import json
import re
import time

import pytest
import torch
from small_models import Net, fit, loader, samples
from torch.utils.data import DataLoader, Dataset, default_collate

import geartrain as gt
from geartrain_monitor.profile import Profile

SECONDS = 0.02


class SlowDataset(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        time.sleep(SECONDS / 4)
        return tuple(x[index] for x in samples(32).tensors)


def slow_collate(batch):
    time.sleep(SECONDS)
    return default_collate(batch)


class Items(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.value = loss.item()
        return loss


class Logging(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class SlowLogger:
    @gt.hookimpl
    def log_metrics(self):
        time.sleep(SECONDS)


class Saves:
    @gt.hookimpl
    def on_step_end(self, run):
        run.save_checkpoint(run.checkpoint(run.epoch), run.output / "a.ckpt")


class SlowFiles:
    @gt.hookimpl(wrapper=True)
    def save_checkpoint(self):
        time.sleep(SECONDS)
        return (yield)


PROGRAMS = {
    "dataset": (Net, {"train": DataLoader(SlowDataset(), 4)}, "input-bound.*try num_workers"),
    "collate": (
        Net,
        {"train": loader(32, collate_fn=slow_collate)},
        "input-bound.*is the collate_fn",
    ),
    "workers": (
        Net,
        {"train": DataLoader(SlowDataset(), 4, num_workers=1)},
        "input-bound.*try num_workers=2",
    ),
    "item": (Items, {}, r"waits for the device.*test_verdict\.py:\d+: self\.value = loss\.item"),
    "logger": (
        Logging,
        {"plugins": [SlowLogger()], "log_every_n_steps": 1},
        "writes logs; .*SlowLogger.* log_metrics takes most of it.*log_every_n_steps",
    ),
    "checkpoint": (
        Net,
        {"plugins": [Saves(), SlowFiles()]},
        "writes checkpoints; .*async_checkpoint",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_slow_is_named(name, tmp_path):
    module, options, words = PROGRAMS[name]
    options = {"train": loader(32), **options}
    plugins = [Profile(trace=False), *options.pop("plugins", [])]
    fit(module(), plugins=plugins, output=tmp_path, **options)
    sentences = json.loads((tmp_path / "profile.json").read_text())["verdict"]
    assert any(re.search(words, sentence) for sentence in sentences), sentences
    if name in ("dataset", "collate", "workers"):
        assert sentences[0].startswith("input-bound")


def test_a_step_that_computes(tmp_path):
    class Large(Net):
        def training_step(self, batch, batch_idx):
            weight = self.layers[0].weight
            for _ in range(50):
                torch.ones(300, 300) @ torch.ones(300, 300)
            return self.loss(batch) + 0 * weight.sum()

    fit(Large(), plugins=[Profile(trace=False)], output=tmp_path)
    (sentence,) = json.loads((tmp_path / "profile.json").read_text())["verdict"]
    assert sentence.startswith("compute-bound")
