"""The module learns, and the options of config.yaml exist."""

from __future__ import annotations

from pathlib import Path

import geartrain as gt
from geartrain_cli import main

from mine import MineData, MineModule

HERE = Path(__file__).parent


def test_learns() -> None:
    trainer = gt.Trainer(accelerator="cpu", max_epochs=5, seed=1, enable_progress_bar=False)
    trainer.fit(MineModule(), datamodule=MineData())
    assert trainer.callback_metrics["val_acc"] > 0.9


def test_config() -> None:
    target, config = str(HERE / "mine.py"), str(HERE / "config.yaml")
    assert main(["fit", target, "--config", config, "--fast-dev-run", "true"]) == 0
