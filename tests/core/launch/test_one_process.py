"""Core launches one process: it refuses launchers and strategies of several processes."""

import json
import os

import pytest
from small_models import Net, Pretend, fit, loader, trainer

from geartrain import UsageError

ONE_OF_TORCHRUNS = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}


def test_a_launcher_that_started_more_processes_than_are_planned_is_refused(monkeypatch):
    for name, value in {**ONE_OF_TORCHRUNS, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UsageError,
        match=r"the plan has 1 processes .* torchrun started 2 .*Fix: --devices 2 --num-nodes 1",
    ):
        fit(devices=1)


@pytest.mark.end_to_end
def test_one_process_of_torchrun_trains_and_records_its_error_for_torchrun(monkeypatch, tmp_path):
    for name, value in ONE_OF_TORCHRUNS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert fit(devices=1).global_step == 6
    assert not os.listdir(tmp_path)

    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(Fails(), devices=1)
    assert (
        "KeyError: 'mine'"
        in json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    )


@pytest.mark.parametrize(
    "hook",
    [
        *("launch", "shard_dataloader", "wrap_model", "log_sync", "all_gather", "broadcast"),
        *("barrier", "teardown_process_group"),
    ],
)
def test_a_hook_of_several_processes_that_is_left_to_core_is_refused_before_anything_starts(hook):
    strategy = type("Forgets", (Pretend,), {hook: None})
    with pytest.raises(UsageError) as caught:
        trainer(strategy=strategy(), devices=2).fit(Net(), loader())
    assert str(caught.value) == (
        f"Forgets plans 2 processes and does not implement {hook}. "
        "Fix: extend geartrain.parallel.ProcessGroupStrategy (pip install geartrain-parallel), "
        "or implement them"
    )
