"""The plugin ``chaos``: faults that a user orders, once in a run."""

import pytest
import torch
from small_models import Net, loader, trainer

import geartrain as gt
from geartrain.testing import run_plugin
from geartrain_resilience.chaos import Chaos, ChaosError, damage


def fit(output, path=None, **faults):
    one = trainer(output=output, plugins=[Chaos(**faults)], max_epochs=2, seed=1)
    one.fit(Net(), loader(), ckpt_path=path)
    return one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnak=1,step=3", "Did you mean 'rank'"),
        ("rank=1", "must name a step from 1"),
        ("rank=-1,step=3", "a rank from 0"),
        ("rank=one,step=3", "rank must be a number"),
        ("step=3,seconds=0", "must name a step"),
        ("", "has no fault"),
    ],
)
def test_a_fault_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(gt.UsageError, match=message):
        Chaos(kill=text)


@pytest.mark.parametrize(
    ("faults", "options", "message"),
    [
        ({"kill": "rank=1,step=3"}, {}, "is for rank 1, and the only one is 0"),
        ({"kill": "step=9"}, {"max_steps": 8}, "is for step 9, and max_steps=8"),
        ({"kill": "step=3"}, {"output": None}, "Fix: --output DIR"),
        ({"disconnect": "step=3"}, {}, "needs another rank"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(tmp_path, faults, options, message):
    options = {"output": tmp_path / "run", **options}
    with pytest.raises(gt.UsageError, match=message):
        trainer(plugins=[Chaos(**faults)], **options).fit(Net(), loader())
    assert not (tmp_path / "run" / "plan.json").exists()


def test_a_misspelt_kind_is_refused(command, installed):
    installed |= {"geartrain-parallel", "geartrain-resilience"}
    line = "fit net.py --output runs/1 --plugin chaos --chaos.kil step=3"
    done = command(line)
    assert done.code == 2
    assert "Did you mean 'chaos.kill'?" in done.err


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("exception", ChaosError, "on purpose, in step 8 of rank 0"),
        ("out_of_memory", RuntimeError, "allocate"),
        ("terminate", KeyboardInterrupt, "ended by SIGTERM"),
        ("kill_worker", gt.TrainingError, "finds no worker"),
    ],
)
def test_a_fault_fires_once_in_its_step_also_after_a_resume(tmp_path, kind, error, message):
    with pytest.raises(error, match=message):
        fit(tmp_path / "run", **{kind: "step=8"})
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["step"] == 6
    assert fit(tmp_path / "run", "auto", **{kind: "step=8"}).global_step == 12


def test_a_new_run_in_the_folder_of_one_that_failed_early_has_its_faults(tmp_path):
    for _ in range(2):
        with pytest.raises(ChaosError):
            fit(tmp_path / "run", exception="step=2")


def test_the_fault_is_on_its_rank(tmp_path):
    results = run_plugin(
        [Chaos(exception="rank=1,step=2")], ranks=2, check=False, output=tmp_path / "run"
    )
    assert isinstance(results[1].error, ChaosError)
    assert not isinstance(results[0].error, ChaosError)


def test_several_faults_of_a_kind(tmp_path):
    faults = {"exception": "step=8;step=11"}
    for path, step in ((None, 8), ("auto", 11)):
        with pytest.raises(ChaosError, match=f"in step {step} of rank 0"):
            fit(tmp_path / "run", path, **faults)
    assert fit(tmp_path / "run", "auto", **faults).global_step == 12


def test_a_damaged_checkpoint_is_noticed(tmp_path):
    with pytest.raises(ChaosError):
        fit(tmp_path / "run", corrupt_checkpoint="step=1", exception="step=8")
    with pytest.raises(gt.TrainingError, match="damaged"):
        fit(tmp_path / "run", "last", kill="step=99")


def test_each_damage_is_noted_as_the_fault_that_it_is(tmp_path):
    fit(tmp_path / "run", corrupt_checkpoint="step=1;step=8")
    names = {file.name for file in (tmp_path / "run" / "chaos").iterdir()}
    assert names == {f"corrupt_checkpoint-rank0-step{step}" for step in (1, 8)}


def test_damage_changes_the_file_and_not_its_size(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1000)
    damage(file)
    assert (len(file.read_bytes()), file.read_bytes().count(b"x")) == (1000, 936)
