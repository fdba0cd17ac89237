"""Invalid options are refused before anything starts; the plan shows the strategy's changes."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import geartrain as gt

pytest.importorskip("geartrain_horovod", reason="geartrain-horovod is not installed")
checks = pytest.importorskip("geartrain_horovod.checks")
real = pytest.mark.horovod


class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Net):
    automatic_optimization = False


def planned(module=Net, devices=2, options=None, **more):
    return gt.Trainer(
        strategy="horovod", accelerator="cpu", devices=devices, strategy_options=options, **more
    ).check(module)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": "mean"}, ("op='mean'", "'average', 'sum', 'adasum'")),
        ({"compression": "bf16"}, ("compression='bf16'", "'none', 'fp16'")),
        ({"groups": 0}, ("groups=0", "whole number", "above 0")),
        ({"groups": 2.5}, ("groups=2.5",)),
        ({"stall_timeout": -1}, ("stall_timeout=-1", "above 0", "0: no timeout")),
        ({"backward_passes_per_step": 0}, ("backward_passes_per_step=0",)),
        ({"gradient_predivide_factor": -1.0}, ("gradient_predivide_factor=-1.0",)),
        (
            {"gradient_predivide_factor": 2.0, "op": "sum"},
            ("gradient_predivide_factor=2.0", "op='average'", "op='sum'"),
        ),
        (
            {"gradient_predivide_factor": 2.0, "groups": 3, "distributed_optimizer": True},
            (
                "distributed_optimizer=True",
                "groups=3",
                "gradient_predivide_factor=2.0",
                "leave one out",
            ),
        ),
        ({"process_set": [0]}, ("process_set=[0]", "at least two")),
        ({"process_set": [1, 2]}, ("process_set=[1, 2]", "train alone", "rank 0")),
        ({"process_set": [0, 0]}, ("process_set=[0, 0]", "each once")),
        ({"process_set": [0, -1]}, ("process_set=[0, -1]",)),
        ({"op": "adasum", "process_set": [0, 1]}, ("adasum", "process_set=[0, 1]")),
        ({"op": "adasum", "distributed_optimizer": True}, ("adasum", "distributed_optimizer=True")),
        (
            {"elastic": True},
            ("elastic=True needs", "horovodrun -np 2 --min-np 1", "--host-discovery-script"),
        ),
        (
            {"elastic": True, "process_set": [0, 1]},
            ("elastic=True", "process_set=[0, 1]", "come and go"),
        ),
        ({"elastic": True, "op": "adasum"}, ("elastic=True", "op='adasum'")),
        ({"elastic": True, "timeline": "t.json"}, ("elastic=True", "timeline")),
        ({"commit_every_n_steps": 5}, ("commit_every_n_steps=5", "elastic=True")),
        ({"elastic": True, "commit_every_n_steps": 0}, ("commit_every_n_steps=0", "above 0")),
    ],
    ids=str,
)
def test_invalid_horovod_options_are_refused(options, words):
    with pytest.raises(gt.UsageError) as caught:
        planned(options=options)
    for word in words:
        assert word in str(caught.value)


@real
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"devices": 3, "options": {"op": "adasum"}}, ("needs 2, 4, 8, ... ranks", "has 3")),
        ({"options": {"op": "adasum"}}, ("adasum", "needs MPI", "HOROVOD_WITH_MPI=1", "mpirun")),
        ({"options": {"process_set": [0, 2]}}, ("process_set=[0, 2]", "rank 2", "2 ranks")),
        (
            {"options": {"backward_passes_per_step": 3}},
            (
                "backward_passes_per_step=3",
                "accumulate_grad_batches=1",
                "--accumulate-grad-batches 3",
            ),
        ),
        ({"options": {"timeline": "/no/such/folder/timeline.json"}}, ("timeline", "/no/such")),
    ],
    ids=str,
)
def test_impossible_horovod_plans_are_refused(more, words):
    with pytest.raises(gt.UsageError) as caught:
        planned(**more)
    for word in words:
        assert word in str(caught.value)


#: A launcher's variables in rank 0 of two.
PLACE = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in PLACE.items()}
HOROVODRUN = {
    f"HOROVOD_{name}": value
    for name, value in {**PLACE, "CROSS_RANK": "0", "CROSS_SIZE": "1"}.items()
}


@real
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("built", "launcher", "why"),
    [
        (True, OPEN_MPI, None),
        (True, {}, "the ranks meet by Gloo"),
        (True, HOROVODRUN, "the ranks meet by Gloo"),
        (False, OPEN_MPI, "this Horovod was built without it"),
    ],
    ids=["mpirun", "no launcher", "horovodrun", "without MPI"],
)
def test_adasum_needs_mpi_built_and_used(monkeypatch, accelerator, built, launcher, why):
    """Under Gloo, Horovod's thread would abort the process, also on GPUs and if built with MPI."""
    import horovod.torch as hvd

    monkeypatch.setattr(hvd, "mpi_built", lambda: built)
    monkeypatch.setattr(hvd, "nccl_built", lambda: True)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    plan = SimpleNamespace(
        accelerator=SimpleNamespace(name=accelerator),
        processes=2,
        strategy=SimpleNamespace(label="LABEL"),
    )
    if why is None:
        checks.check_here(plan, "adasum", None)
        return
    with pytest.raises(
        gt.UsageError,
        match=rf"LABEL: op='adasum' needs MPI, and {why}\. "
        "Fix: .* under mpirun or horovodrun --mpi",
    ):
        checks.check_here(plan, "adasum", None)


@real
def test_only_rank_0_needs_a_folder_for_the_timeline(monkeypatch):
    """The folder may not exist on other nodes."""
    for name, value in {**HOROVODRUN, "HOROVOD_RANK": "1", "HOROVOD_LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert planned(options={"timeline": "/no/such/folder/timeline.json"}).processes is None
    monkeypatch.setenv("HOROVOD_RANK", "0")
    with pytest.raises(gt.UsageError, match="/no/such/folder"):
        planned(options={"timeline": "/no/such/folder/timeline.json"})


@real
def test_a_second_timeline_beside_the_environments_is_refused(monkeypatch):
    """Otherwise Horovod would refuse a second timeline in the middle of set-up."""
    monkeypatch.setenv("HOROVOD_TIMELINE", "other.json")
    with pytest.raises(
        gt.UsageError,
        match=r"timeline='t.json': HOROVOD_TIMELINE='other.json', .*Fix: leave one out",
    ):
        planned(options={"timeline": "t.json"})


@real
def test_backward_passes_that_match_accumulation_are_accepted():
    assert (
        planned(options={"backward_passes_per_step": 3}, accumulate_grad_batches=3).processes == 2
    )
    assert planned(Manual, options={"backward_passes_per_step": 3}).processes == 2


@real
def test_torchs_sync_batch_norm_is_refused():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net())
    with pytest.raises(gt.UsageError, match=r"Net\.norm is torch's SyncBatchNorm.*Fix: "):
        planned(model)
    assert planned(model, devices=1).processes == 1


@real
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "× 2 (scale_lr, 2 worker(s))"),
        ({"scale_lr": False}, "as configured (scale_lr=False, 2 worker(s))"),
        ({"op": "sum"}, "as configured (op='sum', 2 worker(s))"),
    ],
    ids=str,
)
def test_the_plan_shows_the_factor_of_learning_rates(options, expected):
    plan = planned(options=options)
    assert plan.notes == {"learning rates": expected}
    assert plan.as_dict()["notes"] == {"learning rates": expected}


@real
def test_the_plan_names_ranks_that_train_alone():
    assert (
        planned(devices=3, options={"process_set": [0, 2]}).notes["process set"]
        == "ranks [1] train alone, at rates as configured"
    )


@real
def test_explain_prints_the_factor_of_learning_rates(tmp_path):
    (tmp_path / "train.py").write_text(
        "import geartrain as gt, torch\nclass Net(gt.Module):\n"
        "    def training_step(self, batch, batch_idx): ...\n"
        "    def configure_optimizers(self): ...\n"
    )
    code = "from geartrain.commands import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code]
    options = "--strategy horovod --devices 4 --accelerator cpu"
    words = ["explain", "train.py", *options.split()]
    run = subprocess.run(
        [*command, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert run.returncode == 0, run.stderr
    (line,) = (line for line in run.stdout.splitlines() if "learning rates" in line)
    assert "× 4" in line
    run = subprocess.run(
        [*command, *words, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert json.loads(run.stdout)["notes"] == {"learning rates": "× 4 (scale_lr, 4 worker(s))"}


def test_a_missing_horovod_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setattr(
        "geartrain_horovod.checks.missing", lambda: "Horovod is not installed. Fix: build it"
    )
    with pytest.raises(
        gt.UsageError,
        match=r"geartrain-horovod\[horovod\]: Horovod is not installed\. Fix: build it",
    ):
        planned()


@pytest.mark.end_to_end
def test_planning_imports_no_horovod():
    code = (
        "import sys, geartrain as gt\n"
        "from geartrain_horovod import HorovodStrategy\n"
        "gt.Trainer(strategy=HorovodStrategy(), accelerator='cpu', devices=2).plan\n"
        "assert 'horovod' not in sys.modules, 'imported'\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@real
def test_the_plan_of_an_elastic_run_is_the_same_on_every_rank(monkeypatch):
    """A worker that joins later compares its plan with rank 0's."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    notes = planned(options={"elastic": True, "commit_every_n_steps": 5}).notes
    assert notes == {
        "elastic": "a commit at the start of each epoch and after every 5 steps",
        "learning rates": "× current workers (scale_lr)",
    }
