"""``geartrain scale``: another number of processes of a run that trains."""

import json
import threading

import pytest

import geartrain as gt
from geartrain_elastic import scale
from geartrain_testing.launching import until

from .models import fit, state

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("devices", [3, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_run_goes_on_with_other_processes(tmp_path, capfd, devices):
    def ask():
        until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), 60, "the run trains")
        scale.command("scale", [str(tmp_path / "run"), "--devices", str(devices)])

    quiet = state(tmp_path / "quiet", fit(tmp_path / "quiet", 1, 4, max_epochs=12)[1])
    thread = threading.Thread(target=ask)
    thread.start()
    _, module = fit(tmp_path / "run", 2, 4, max_epochs=12, net={"slow": 0.05})
    thread.join()
    assert state(tmp_path / "run", module) == quiet
    said = capfd.readouterr()
    assert f"geartrain: {devices} processes from now on" in said.err
    assert f"starts {devices} processes, which take over" in said.out


def run_folder(folder, strategy="elastic"):
    folder.mkdir()
    plan = {"strategy": {"name": strategy}, "processes": 4}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def test_a_run_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "_PATIENCE", 0.2)
    folder = run_folder(tmp_path / "run")
    with pytest.raises(gt.TrainingError, match=r"has not answered in 0\.2 s\. Fix: pass the"):
        scale.command("scale", [str(folder), "--devices", "3"])
    (folder / "summary.json").touch()
    with pytest.raises(gt.TrainingError, match="has ended"):
        scale.command("scale", [str(folder), "--devices", "3"])
    assert not (folder / scale.REQUEST).exists()


@pytest.mark.parametrize(
    ("strategy", "devices", "message"),
    [
        ("elastic", 5, r"--devices 5: the run has 4 ranks\. Fix: a number from 1 to 4"),
        ("elastic", 0, "a number from 1 to 4"),
        ("ddp", 2, r"has the strategy ddp, whose processes are fixed\. Fix: --strategy elastic"),
        (None, 2, r"is not the folder of a run .*\. Fix: pass the folder"),
    ],
)
def test_refusals(tmp_path, strategy, devices, message):
    folder = tmp_path if strategy is None else run_folder(tmp_path / "run", strategy)
    with pytest.raises(gt.UsageError, match=message):
        scale.command("scale", [str(folder), "--devices", str(devices)])
