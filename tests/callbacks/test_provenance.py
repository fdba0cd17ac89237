"""``provenance.jsonl``: how a fit was started, and when its steps were done."""

import json
import subprocess
import sys

import pytest
from small_models import Net, loader

import geartrain as gt


class Tested(Net):
    def test_step(self, batch, batch_idx):
        pass


def lines(folder):
    text = (folder / "provenance.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def fit(output, **options):
    trainer = gt.Trainer(
        accelerator="cpu", output=output, enable_progress_bar=False, log_every_n_steps=1, **options
    )
    trainer.fit(Net(), loader(), ckpt_path="last" if options["max_epochs"] > 1 else None)
    return trainer


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The working directory, a repository with one commit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("1")
    for words in ("init -q .", "add file", "-c user.name=a -c user.email=b commit -q -m c"):
        subprocess.run(["git", *words.split()], check=True)
    return tmp_path


def test_each_start_has_its_command_commit_and_parameters(repository, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "a b"])
    fit("run", max_epochs=1)
    (repository / "file").write_text("2")
    fit("run", max_epochs=2)
    first, second = (line for line in lines(repository / "run") if isinstance(line, dict))
    count = sum(p.numel() for p in Net().parameters())
    assert first["command"] == "python train.py --lr 'a b'"
    assert first["directory"] == str(repository)
    assert (first["parameters"], first["trainable_parameters"]) == (count, count)
    assert len(first["commit"]) == 12
    assert (first["uncommitted_changes"], second["uncommitted_changes"]) == (False, True)
    assert first["started"] <= second["started"]
    assert first["host"]


def test_the_last_step_has_its_time(tmp_path):
    trainer = fit(tmp_path, max_epochs=1)
    timed = [line for line in lines(tmp_path) if isinstance(line, list)]
    assert timed[-1][0] == trainer.global_step
    assert 0 <= timed[0][1] <= timed[-1][1] < 60


def test_a_directory_without_git_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    fit("run", max_epochs=1)
    start = lines(tmp_path / "run")[0]
    assert "commit" not in start
    assert start["host"]


def test_nothing_is_written_without_a_folder_or_by_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(None, max_epochs=1)
    assert list(tmp_path.iterdir()) == []
    gt.Trainer(output="test", enable_progress_bar=False).test(Tested(), loader())
    assert not (tmp_path / "test" / "provenance.jsonl").exists()
