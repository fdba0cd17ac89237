"""The command prints a run's metrics, and refuses a folder without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from geartrain_cli import main


def test_prints_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"metrics": {"loss": 0.5, "acc": 0.75}}))
    assert main(["mine", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "loss 0.5\nacc 0.75\n"


def test_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mine", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no finished run" in capsys.readouterr().err
