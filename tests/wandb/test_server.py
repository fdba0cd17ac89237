"""Logging in, and runs whose server answers, goes away or does not answer."""

import os
import socket
import sys
import urllib.request
from importlib.machinery import PathFinder

import pytest

from geartrain import UsageError, hookimpl
from geartrain_wandb import WandB

from .cases import Net, loader, offline, trainer
from .conftest import services
from .record import recorded
from .server import serving

KEY = "0123456789" * 4


# --- before a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "you are not logged in.*wandb login.*--wandb.mode offline"),
        ("short", "WANDB_API_KEY invalid"),
    ],
)
def test_without_a_valid_key_nothing_starts(tmp_path, monkeypatch, key, message):
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(UsageError, match=rf"geartrain-wandb\[wandb\]: {message}"):
        trainer(WandB(), output="out").fit(Net(), loader())
    assert not services()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["variable", "netrc", "offline", "settings"])
def test_a_key_is_found_in_the_same_places_as_by_wandb(tmp_path, monkeypatch, place):
    if place == "variable":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    elif place == "netrc":
        (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
        (tmp_path / "netrc").chmod(0o600)
    elif place == "offline":
        monkeypatch.setenv("WANDB_MODE", "offline")
    else:  # the file that `wandb offline` writes
        (tmp_path / "wandb's own").mkdir()
        (tmp_path / "wandb's own" / "settings").write_text("[default]\nmode = offline\n")
    trainer(WandB()).check(Net)
    assert not services()
    assert not list(tmp_path.rglob("*.wandb"))


class NotInstalled:
    """Hide wandb, but find a folder of an earlier run, which Python could import."""

    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, ["."]) if name == "wandb" else None


def test_a_missing_wandb_is_an_error_before_anything_starts(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    message = r"geartrain-wandb\[wandb\]: the package wandb is not installed. Fix: pip install wan"
    with pytest.raises(UsageError, match=message):
        trainer(offline(), output="out").fit(Net(), loader())
    assert not (tmp_path / "out").exists()


# --- servers --------------------------------------------------------------------------------------


@pytest.mark.end_to_end
@pytest.mark.parametrize("server", ["refuses", pytest.param("is silent", marks=pytest.mark.matrix)])
def test_a_run_is_offline_if_the_server_does_not_answer(tmp_path, monkeypatch, server):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if server == "is silent":
            listening.listen(50)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.warns(UserWarning, match="its server does not answer.*wandb sync .*offline-ru"):
            trainer(WandB(), output="out").fit(Net(), loader())
    (run,) = [run for run in recorded(tmp_path / "out") if run.of("history")]
    assert run.exit_code == 0


class Away:
    """A plugin that ends wandb's server after the first epoch."""

    @hookimpl
    def on_epoch_end(self, run):
        if run.epoch == 0:
            urllib.request.urlopen(os.environ["WANDB_BASE_URL"] + "/go-away").close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_DISABLE_CODE", "true")
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        yield server


def steps(rows):
    return [row["trainer/global_step"] for row in rows if "loss_step" in row]


def test_a_server_gets_every_step_of_a_run(server):
    trainer(WandB(project="p")).fit(Net(), loader())
    assert server.exit_codes == [0]
    assert steps(server.rows) == list(range(1, 9))


def test_a_server_gets_every_step_of_a_failed_run(server):
    with pytest.raises(ValueError, match="too bad"):
        trainer(WandB(project="p")).fit(Net(fails=ValueError("too bad")), loader())
    assert server.exit_codes == [1]
    assert steps(server.rows) == list(range(1, 5))


def test_a_run_whose_server_goes_away_is_on_disk(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "3")
    trainer(WandB(project="p"), Away()).fit(Net(), loader())
    assert "Timed out finishing run" in capsys.readouterr().err
    (run,) = recorded(tmp_path)
    assert steps(run.rows) == list(range(1, 9))
