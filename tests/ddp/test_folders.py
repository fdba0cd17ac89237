"""The numbered folder of a fit of the command line: all ranks have the one that rank 0 made."""

import os
from pathlib import Path

import pytest
from several_ranks import failed, program, results, run
from torch.utils.data import DataLoader

import geartrain as gt

from .cases import Net, samples


class Model(Net):
    def train_dataloader(self):
        return DataLoader(samples(), batch_size=4)


def fit(strategy, *options):
    """Return the folder as each object of a rank has it."""
    argv = ["fit", "--strategy", strategy, "--devices", "2", "--accelerator", "cpu", *options]
    trainer = gt.cli(Model, argv=argv)
    (folder,) = [part.plugin for part in trainer.hooks.parts if part.info.name == "folder"]
    return [str(path) for path in (trainer.output, trainer.run.output, folder.path)]


def fit_elsewhere(*options):
    """Fit in another working folder on rank 1, where other runs are."""
    if os.environ["RANK"] == "1":
        os.chdir("other")
    return fit("ddp", *options)


def folders(tmp_path):
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/model-*"))


def test_under_a_launcher(tmp_path):
    for epochs, options, name in (("1", (), "model-1"), ("1", (), "model-2")):
        found = results(tmp_path, fit, "ddp", "--max-epochs", epochs, *options)
        assert found == [[f"runs/{name}"] * 3] * 2
    found = results(tmp_path, fit, "ddp", "--max-epochs", "2", "--resume")
    assert found == [["runs/model-2"] * 3] * 2
    assert folders(tmp_path) == ["runs/model-1", "runs/model-2"]


def test_rank_0_alone_prints(tmp_path):
    first, second = run(tmp_path, fit, "ddp", "--max-epochs", "1")
    assert "on 2 cpu devices with ddp, in runs/model-1\n" in first.err
    assert first.out.splitlines()[-2:] == [
        "saved in runs/model-1",
        "look: geartrain report runs/model-1",
    ]
    assert "model-1" not in second.printed


@pytest.mark.parametrize(
    "options",
    [[], pytest.param(["--output", "runs/model-{n}"], marks=pytest.mark.end_to_end)],
)
def test_ranks_that_geartrain_starts(tmp_path, options):
    with program(tmp_path, fit, "ddp", "--max-epochs", "1", *options) as started:
        started.succeed(100)
    assert started.out.count("saved in runs/model-1\n") == 1
    assert started.err.count("with ddp, in runs/model-1\n") == 1
    assert folders(tmp_path) == ["runs/model-1"]
    assert (tmp_path / "runs/model-1/last.ckpt").exists()


def test_ranks_that_are_spawned(tmp_path):
    options = ["--max-epochs", "1", "--strategy.start_method", "fork"]
    (alone,) = run(tmp_path, fit, "ddp_spawn", *options, ranks=1, place="alone")
    assert alone.result == ["runs/model-1"] * 3
    assert alone.err.count("with ddp_spawn, in runs/model-1\n") == 1
    assert alone.out.splitlines()[-2:] == [
        "saved in runs/model-1",
        "look: geartrain report runs/model-1",
    ]
    assert folders(tmp_path) == ["runs/model-1"]


def test_ranks_that_would_resume_different_runs_are_refused(tmp_path):
    results(tmp_path, fit, "ddp", "--max-epochs", "1")
    other = tmp_path / "other" / "runs"
    other.mkdir(parents=True)
    (tmp_path / "runs" / "model-1").rename(other / "model-2")
    results(tmp_path, fit, "ddp", "--max-epochs", "1")
    _, second = failed(tmp_path, fit_elsewhere, "--max-epochs", "2", "--resume")
    assert "the run to resume: runs/model-1, runs/model-2" in second.printed
    assert Path(tmp_path, "runs/model-1/last.ckpt").exists()
