"""The folder of a fit without --output: runs/NAME-N."""

import os
import shutil
import subprocess
import sys

import pytest
from jsonargparse import Namespace

from geartrain import UsageError
from geartrain_cli.folders import RunFolders, run_name


def numbers(folder):
    return sorted(path.name for path in (folder / "runs").glob("*"))


def test_a_fit_is_saved_in_the_next_free_folder(command, folder, left):
    for number in (1, 2):
        done = command("fit net.py --max-epochs 1 --seed 1")
        assert done.code == 0, done.err
        assert f"on cpu, in runs/net-{number}\n" in done.err
        assert done.out.splitlines()[-2:] == [
            f"saved in runs/net-{number}",
            f"look: geartrain report runs/net-{number}",
        ]
        assert left(f"runs/net-{number}", "summary.json")["status"] == "done"
    assert command("report runs/net-2").code == 0
    shutil.rmtree(folder / "runs" / "net-1")
    command("fit net.py --max-epochs 1 --quiet")
    assert numbers(folder) == ["net-2", "net-3"]  # the newest has the largest number


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("Net", "net"),
        ("CharLM", "char_lm"),
        ("ResNet18", "res_net18"),
        ("HTTPServer", "http_server"),
        ("_Net", "net"),
        ("_", "run"),
    ],
)
def test_the_name_is_the_class_in_words(module, name):
    assert run_name(type(module, (), {})) == name


def test_no_output_saves_nothing(command, folder):
    done = command("fit net.py --max-epochs 1 --no-output")
    assert done.out.splitlines()[-1] == "nothing was saved: --output DIR"
    done = command("fit net.py --fast-dev-run")
    assert done.out.splitlines()[-1] == "nothing was saved: fast_dev_run"
    assert command("test net.py").code == 0
    assert command("explain net.py --no-output").code == 0
    assert not (folder / "runs").exists()


def test_output_and_no_output_in_a_file_and_on_the_command_line(command, folder, write, refused):
    write("out.yaml", "max_epochs: 1\noutput: mine\n")
    write("none.yaml", "max_epochs: 1\nno_output: true\n")
    write("null.yaml", "max_epochs: 1\noutput: null\n")  # as --print-config writes it
    for options, made in {
        "--config out.yaml --no-output": None,
        "--config out.yaml": "mine",
        "--config none.yaml": None,
        "--config none.yaml --output typed": "typed",
        "--config null.yaml": "runs",
    }.items():
        before = {path.name for path in folder.iterdir()}
        assert command(f"fit net.py {options}").code == 0
        new = {path.name for path in folder.iterdir()} - before - {"__pycache__"}
        assert new == ({made} if made else set())
    assert "contradict" in refused("fit net.py --output a --no-output")


def test_the_user_may_number_another_folder(command, folder, write, left, refused):
    write("conf.yaml", "max_epochs: 1\noutput: all/a-{n}.run\n")
    assert command("fit net.py --config conf.yaml").code == 0
    assert command("test net.py --config conf.yaml --checkpoint all/a-1.run/last.ckpt").code == 0
    assert command("fit net.py --config conf.yaml --max-epochs 2 --resume").code == 0
    assert left("all/a-1.run", "summary.json")["epochs"] == 2
    assert left("all/a-2.run", "summary.json")["command"] == "test"
    assert sorted(path.name for path in (folder / "all").iterdir()) == ["a-1.run", "a-2.run"]
    assert command("explain net.py --config conf.yaml").code == 0
    assert "in the last part" in refused("fit net.py --output a-{n}/b")


def test_json_names_the_folder(command):
    assert command("fit net.py --max-epochs 1 --json").facts["output"] == "runs/net-1"


def test_a_script_with_cli_is_saved_and_a_trainer_is_not(python, folder):
    done = python("net.py", "--max-epochs", "1")
    assert "saved in runs/net-1" in done.stdout
    (folder / "train.py").write_text(
        "import geartrain as gt, net\n"
        "gt.Trainer(max_epochs=1).fit(net.Net(), net.Data().train_dataloader())\n"
    )
    assert 'nothing was saved: output="DIR"' in python("train.py").stdout
    assert numbers(folder) == ["net-1"]


@pytest.mark.parametrize("options", ["--devices 0", "--model.hidden -1", "--block nothing"])
def test_an_error_before_the_run_leaves_no_folder(command, folder, options):
    assert command(f"fit net.py {options}").code == 1 + ("model" not in options)
    assert not (folder / "runs").exists()


def test_a_folder_that_cannot_be_made(refused, folder):
    (folder / "runs").write_text("a file")
    error = refused("fit net.py --max-epochs 1")
    assert "cannot be saved in runs/net-1: " in error
    assert "Fix: --output DIR, or fit with --no-output" in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission(refused, folder):
    folder.chmod(0o500)
    try:
        assert "Permission denied" in refused("fit net.py --max-epochs 1")
    finally:
        folder.chmod(0o700)


MAKE = """
import sys
from jsonargparse import Namespace
from geartrain_cli.folders import RunFolders

sys.stdin.read()
for _ in range(20):
    values = Namespace(output=None, no_output=False, fast_dev_run=False, num_nodes=1, resume=None)
    RunFolders().choose("fit", values, type("Net", (), {}))
    print(values.output)
"""


@pytest.mark.drill
def test_runs_that_start_at_one_moment_have_different_folders(folder):
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for _ in range(3)
    ]
    for program in programs:
        program.stdin.close()
    made = [line for program in programs for line in program.stdout.read().splitlines()]
    assert [program.wait(60) for program in programs] == [0, 0, 0]
    assert len(made) == len(set(made)) == 60


# --- --resume -------------------------------------------------------------------------------------


def test_resume_without_output_continues_the_newest_run(command, folder, left):
    for _ in range(2):
        assert command("fit net.py --max-epochs 1").code == 0
    done = command("fit net.py --max-epochs 2 --resume")
    assert done.code == 0, done.err
    assert "in runs/net-2, resumes after 4 steps" in done.err
    assert left("runs/net-2", "summary.json")["epochs"] == 2
    assert left("runs/net-1", "summary.json")["epochs"] == 1
    assert numbers(folder) == ["net-1", "net-2"]


def test_resume_from_a_file_continues_in_its_folder(command, folder, left, refused):
    for _ in range(2):
        command("fit net.py --max-epochs 1")
    assert command("fit net.py --max-epochs 2 --resume runs/net-1/last.ckpt").code == 0
    assert left("runs/net-1", "summary.json")["epochs"] == 2
    assert numbers(folder) == ["net-1", "net-2"]
    shutil.copy(folder / "runs/net-1/last.ckpt", folder / "copy.ckpt")
    error = refused("fit net.py --max-epochs 3 --resume copy.ckpt")
    assert "in no folder of a run" in error
    assert "Fix: --output DIR, or --no-output" in error
    assert command("fit net.py --max-epochs 3 --resume copy.ckpt --no-output").code == 0
    assert "there is no checkpoint" in refused("fit net.py --resume runs/net-9/last.ckpt")
    assert numbers(folder) == ["net-1", "net-2"]


def test_resume_never_starts_a_new_run(refused, command, folder):
    assert "there is no run runs/net-N" in refused("fit net.py --resume")
    command("fit net.py --max-epochs 1")
    (folder / "runs/net-2").mkdir()
    (folder / "runs/net-2/plan.json").write_text("{}")
    error = refused("fit net.py --max-epochs 2 --resume")
    assert "runs/net-2, the newest run, has no checkpoint" in error
    assert "Fix: --output runs/net-1" in error
    error = refused("fit net.py --max-epochs 2 --num-nodes 2 --resume")
    assert "Fix: --output DIR" in error


def test_resume_auto_starts_one_run_and_then_continues_it(command, folder, left):
    for epochs in (1, 2, 2):
        done = command(f"fit net.py --max-epochs {epochs} --resume auto")
        assert done.code == 0, done.err
        assert left("runs/net-1", "summary.json")["epochs"] == epochs
    assert numbers(folder) == ["net-1"]


def test_an_interrupted_run_is_resumed_by_the_line_that_it_prints(command, write, folder, left):
    write(
        "mine.py",
        "from net import *\n\n"
        "class Mine(Net):\n"
        "    def on_train_epoch_start(self):\n"
        "        if self.current_epoch == 1 and not self.trainer.plan.resumes:\n"
        "            raise KeyboardInterrupt\n"
        "    def train_dataloader(self):\n"
        "        return Data().train_dataloader()\n",
    )
    done = command("fit mine.py --max-epochs 2")
    assert done.code == 1
    assert "saved in" not in done.out
    (line,) = [line for line in done.err.splitlines() if line.startswith("Resume: geartrain ")]
    assert line.endswith("fit mine.py --max-epochs 2 --resume runs/mine-1/last.ckpt")
    assert command(line.removeprefix("Resume: geartrain ")).code == 0
    assert left("runs/mine-1", "summary.json")["epochs"] == 2


# --- ranks ----------------------------------------------------------------------------------------


def chosen(monkeypatch, rank=None, launcher="torchrun", **options):
    """Return the folder of one rank of two."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    values = {"output": None, "no_output": False, "fast_dev_run": False, "resume": None}
    values = Namespace(**{**values, "num_nodes": 1, **options})
    RunFolders().choose("fit", values, type("Net", (), {}))
    return values.output and str(values.output)


def test_rank_0_alone_makes_a_folder(monkeypatch, folder):
    assert chosen(monkeypatch, rank=1) == "runs/net-N"
    assert not (folder / "runs").exists()
    assert chosen(monkeypatch, rank=0) == "runs/net-1"
    assert numbers(folder) == ["net-1"]


def test_nodes_without_a_launcher_save_nothing(monkeypatch, folder):
    assert chosen(monkeypatch, num_nodes=2) is None
    with pytest.raises(UsageError, match="several nodes need one folder"):
        chosen(monkeypatch, num_nodes=2, output="runs/net-{n}")
    assert not (folder / "runs").exists()
