"""A fit with dp resumes from a checkpoint as if it had not stopped."""

import torch
from torch.utils.data import DataLoader

from geartrain.callbacks import ModelCheckpoint

from .cases import Net, dp, samples


def train(folder, epochs, path=None):
    steps = ModelCheckpoint(
        dirpath=folder / "steps", filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    trainer = dp(max_epochs=epochs, output=folder / "run", plugins=[steps], seed=3)
    trainer.fit(Net(), DataLoader(samples(24), batch_size=8, shuffle=True), ckpt_path=path)
    return trainer


def test_a_resumed_fit_equals_one_without_a_stop(tmp_path):
    whole = train(tmp_path / "whole", 3)
    train(tmp_path / "first", 1)
    for folder, path in (
        ("first", "last"),
        ("within", tmp_path / "whole" / "steps" / "step=4.ckpt"),
    ):
        rest = train(tmp_path / folder, 3, path)
        weights, expected = rest.run.module.state_dict(), whole.run.module.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())
        assert (rest.global_step, rest.current_epoch) == (9, 3)
        assert rest.callback_metrics == whole.callback_metrics
