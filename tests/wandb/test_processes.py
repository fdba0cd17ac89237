"""The plugin in separate programs: command line, login, several processes, signals, leftovers."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from several_ranks import program, results, run

from geartrain_testing.launching import until

from .cases import COMMAND, geartrain, python
from .programs import train_for_ever, train_on_a_rank, train_online, train_twice
from .record import recorded
from .server import serving

DOWNHILL = str(Path(__file__).parents[1] / "integration" / "downhill.py")


# --- the command line -----------------------------------------------------------------------------


def test_chosen_by_name(tmp_path):
    options = {"project": "p", "tags": "[a, b]", "mode": "offline", "checkpoints": "true"}
    given = [word for name, value in options.items() for word in (f"--wandb.{name}", value)]
    done = geartrain(
        "fit", DOWNHILL, "--max-epochs", "2", "--plugin", "wandb", "--output", "out", *given
    )
    assert done.end == "0", done.printed
    (run,) = recorded(tmp_path / "out")
    assert (run.run.project, list(run.run.tags), run.exit_code) == ("p", ["a", "b"], 0)
    logged = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(run.rows) == len(logged)
    assert len(run.of("artifact")) == 2


def test_explain_starts_nothing(tmp_path):
    done = geartrain("explain", DOWNHILL, "--plugin", "wandb", "--wandb.mode", "offline")
    assert done.end == "0", done.printed
    assert "geartrain-wandb" in done.out
    assert not list(tmp_path.rglob("*.wandb"))
    assert not list(tmp_path.rglob("core-debug*"))


# --- logging in -----------------------------------------------------------------------------------


def test_without_a_key_nothing_starts_and_no_prompt_appears(tmp_path):
    done = geartrain("fit", DOWNHILL, "--plugin", "wandb", "--output", "out")
    assert done.end == "2", done.printed
    assert "geartrain-wandb[wandb]: you are not logged in" in done.err
    assert "wandb login" in done.err
    assert "--wandb.mode offline" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("core-debug*"))  # the first file that wandb's service writes


def test_at_a_terminal_no_prompt_appears_either(tmp_path):
    import pty

    mother, child = pty.openpty()
    done = python("-c", COMMAND, "fit", DOWNHILL, "--plugin", "wandb", terminal=child)
    os.close(mother)
    os.close(child)
    assert done.returncode == 2
    assert "you are not logged in" in done.stderr


@pytest.mark.parametrize("how", ["variable", "netrc", "offline", "settings"])
def test_a_key_is_found_in_the_same_places_as_by_wandb(tmp_path, monkeypatch, how):
    key = "0123456789" * 4
    if how == "variable":
        monkeypatch.setenv("WANDB_API_KEY", key)
    elif how == "netrc":
        (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {key}\n")
        (tmp_path / "netrc").chmod(0o600)
    elif how == "offline":
        monkeypatch.setenv("WANDB_MODE", "offline")
    else:  # the file that `wandb offline` writes
        (tmp_path / "wandb's own").mkdir()
        (tmp_path / "wandb's own" / "settings").write_text("[default]\nmode = offline\n")
    done = geartrain("explain", DOWNHILL, "--plugin", "wandb")
    assert done.end == "0", done.printed


def test_a_malformed_key_is_refused(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    done = geartrain("fit", DOWNHILL, "--plugin", "wandb")
    assert done.end == "2"
    assert "geartrain-wandb[wandb]: WANDB_API_KEY invalid" in done.err


@pytest.mark.parametrize("server", ["refuses", pytest.param("is silent", marks=pytest.mark.matrix)])
def test_a_run_is_offline_if_the_server_does_not_answer(tmp_path, monkeypatch, server):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if server == "is silent":
            listening.listen(50)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
        monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")
        done = geartrain(
            "fit", DOWNHILL, "--max-epochs", "2", "--plugin", "wandb", "--output", "out"
        )
    assert done.end == "0", done.printed
    assert done.err.count("its server does not answer") == 1
    (run,) = [run for run in recorded(tmp_path / "out") if run.of("history")]
    assert "wandb sync out/wandb/offline-run-" in done.err
    assert run.exit_code == 0


@pytest.mark.parametrize("what", ["stays", "fails", "goes"])
def test_an_online_run(tmp_path, monkeypatch, what):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "3" if what == "goes" else "60")
    monkeypatch.setenv("WANDB_DISABLE_CODE", "true")
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        (done,) = run(tmp_path, train_online, what, ranks=1, place="alone")
    assert done.end == ("1" if what == "fails" else "0"), done.printed
    steps = [row["trainer/global_step"] for row in server.rows if "loss_step" in row]
    if what == "goes":
        assert "Timed out finishing run" in done.err
        (kept,) = recorded(tmp_path)  # the rest is on disk
        steps = [row["trainer/global_step"] for row in kept.rows if "loss_step" in row]
    else:
        assert server.exit_codes == [int(what == "fails")]
    assert steps == list(range(1, 5 if what == "fails" else 9))


def test_a_missing_wandb_is_an_error_before_anything_starts(tmp_path):
    (tmp_path / "wandb").mkdir()  # a folder of an earlier run, which Python could import
    (tmp_path / "train.py").write_text(
        """
import sys
from importlib.machinery import PathFinder


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, ["."]) if name == "wandb" else None


sys.meta_path.insert(0, NotInstalled())
from geartrain.commands import main

sys.exit(main())
"""
    )
    done = python(
        "train.py",
        "fit",
        DOWNHILL,
        "--plugin",
        "wandb",
        "--wandb.mode",
        "offline",
        "--output",
        "out",
    )
    assert done.returncode == 2, done.stderr
    assert (
        "geartrain-wandb[wandb]: the package wandb is not installed.\nFix: pip install wandb"
        in done.stderr
    )
    assert not (tmp_path / "out").exists()


# --- processes ------------------------------------------------------------------------------------


def test_after_the_run_wandb_has_no_process_left(tmp_path):
    results(tmp_path, train_twice, ranks=1, place="alone")
    assert [run.exit_code for run in recorded(tmp_path)] == [0, 0]


def test_only_the_first_of_two_ranks_has_a_run(tmp_path):
    assert results(tmp_path, train_on_a_rank) == [True, False]
    (run,) = recorded(tmp_path)
    assert [row["trainer/global_step"] for row in run.rows if "loss_step" in row] == [1, 2, 3, 4]
    assert run.config["geartrain"]["processes"] == 2


def test_ctrl_c_marks_the_run_and_leaves_no_process(tmp_path):
    with program(tmp_path, train_for_ever) as started:
        until((tmp_path / "going").exists, 60, "the first batch")
        started.process.send_signal(signal.SIGINT)
        started.wait(60)
        assert not started.left_behind()
    (run,) = recorded(tmp_path)
    assert run.exit_code == 255
    assert run.summary["geartrain/status"] == "interrupted"
