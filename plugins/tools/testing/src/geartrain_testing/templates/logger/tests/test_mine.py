"""Train a small module with the logger, on two ranks in this process."""

from __future__ import annotations

from pathlib import Path

import geartrain as gt
import pytest
from geartrain.testing import run_plugin


def test_writes_a_line_per_step(tmp_path: Path) -> None:
    run_plugin("mine", max_steps=2, output=str(tmp_path))
    lines = (tmp_path / "mine.txt").read_text().splitlines()
    steps = [line.split()[1] for line in lines if "loss_step" in line]
    assert steps == ["1", "2"]


def test_without_a_folder_it_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_plugin("mine", max_steps=1)
    assert not list(tmp_path.iterdir())


def test_wrong_options_are_refused() -> None:
    options = {"mine": {"name": "a/b"}}
    with pytest.raises(gt.UsageError, match="name='a/b'"):
        run_plugin("mine", max_steps=1, plugin_options=options)
