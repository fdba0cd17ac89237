"""Users' paths: ``~`` is the home folder, a URL is refused, and nothing is written elsewhere."""

import json
import os
import sys
from pathlib import Path

import pytest
from small_models import EvalNet, Net, fit, loader, trainer

import geartrain as gt
from geartrain import UsageError
from geartrain.callbacks import ModelCheckpoint
from geartrain.commands import main
from geartrain.files.paths import user_path
from geartrain_callbacks.csv_logger import CSVLogger


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Return a home folder; the test works in another folder, which must stay empty."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/run", "file:///tmp/x", "hdfs:/b", Path("s3://bucket/run")],
)
def test_a_url_is_refused_by_its_option(url):
    with pytest.raises(
        UsageError,
        match=r"^output='\w+:/.* is a URL, and geartrain reads and writes files only. Fix: use",
    ):
        user_path(url, "output")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "is not a path"),
        (True, "is not a path"),
        ("~nobody-of-this-name/x", "no such user"),
    ],
)
def test_values_that_are_no_path(given, words):
    with pytest.raises(UsageError, match=f"output=.*{words}"):
        user_path(given, "output")


@pytest.mark.parametrize(
    "given", ["/abs/run", "./s3:/folder", "C:/run", "a~b", "./~", "key=1:2/x", Path("x")]
)
def test_other_paths_stay_as_they_are(given):
    assert user_path(given, "output") == Path(given)


GIVEN = {
    "output": lambda path: fit(output=path),
    "dirpath": lambda path: fit(
        EvalNet(), val=loader(4), plugins=[ModelCheckpoint("val_loss", dirpath=path)]
    ),
    "csv": lambda path: fit(plugins=[CSVLogger(path=path)]),
    "session": lambda path: gt.Session(accelerator="cpu", output=path).launch(),
    "new": lambda path: main(["new", "plugin", "mine", "--output", path]),
}


@pytest.mark.parametrize("what", GIVEN)
def test_the_home_folder(what, home, capsys):
    GIVEN[what]("~/deep/there")
    assert (home / "deep" / "there").exists()


@pytest.mark.parametrize("what", ["output", "dirpath", "csv", "session"])
def test_a_url_is_refused_before_anything_is_written(what):
    with pytest.raises(UsageError, match=r"='s3://bucket/run' is a URL"):
        GIVEN[what]("s3://bucket/run")


def test_files_of_the_command_line_are_found_in_the_home_folder(home, capsys):
    own = """
from geartrain import Module

class Net(Module):
    def training_step(self, batch): ...
    def configure_optimizers(self): ...
"""
    (home / "net_at_home.py").write_text(own)
    (home / "hooks_at_home.py").write_text(
        "from geartrain import hookimpl\n@hookimpl\ndef on_step_end(run): ...\n"
    )
    (home / "options.yaml").write_text("max_epochs: 7\n")
    given = [
        "~/net_at_home.py",
        "--config=~/options.yaml",
        "--plugin=~/hooks_at_home.py",
        "--accelerator=cpu",
    ]
    assert main(["explain", *given, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["options"]["max_epochs"] == 7
    assert [plugin["name"] for plugin in plan["plugins"]] == ["hooks_at_home", "progress"]


def test_commands_write_into_the_home_folder_and_refuse_a_url(home, capsys):
    (home / "old.py").write_text("import lightning as L\n\ntrainer = L.Trainer(max_epochs=1)\n")
    main(["port", str(home / "old.py"), "-o", "~/new.py"])
    assert (home / "new.py").exists()
    assert main(["port", str(home / "old.py"), "-o", "s3://b/new.py"]) == 2
    assert main(["new", "plugin", "mine", "--output", "s3://bucket/run"]) == 2
    assert "--output='s3://bucket/run' is a URL" in capsys.readouterr().err


def test_a_checkpoint_is_found_in_the_home_folder(home, monkeypatch):
    fit(output=home / "run")
    again = trainer(max_epochs=2)
    again.fit(Net(), loader(), ckpt_path=os.path.join("~", "run", "last.ckpt"))
    assert again.global_step == 12
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, "geartrain_resilience.remote.copies", None)
    message = r"ckpt_path or checkpoint='s3://b/last.ckpt' is a URL.*geartrain-resilience"
    with pytest.raises(UsageError, match=message):
        trainer().fit(Net(), loader(), ckpt_path="s3://b/last.ckpt")


def test_a_session_saves_and_loads_in_the_home_folder(home):
    session = gt.Session(accelerator="cpu")
    session.launch()
    session.save("~/x.ckpt", {"epoch": 3})
    assert (home / "x.ckpt").exists()
    assert session.load("~/x.ckpt")["epoch"] == 3
    with pytest.raises(UsageError, match=r"path='s3://b/x.ckpt' is a URL"):
        session.save("s3://b/x.ckpt", {})
    session.close()


@pytest.mark.parametrize("filename", ["~/x", "s3://b/x", "/x", "a/../../x"])
def test_a_files_name_stays_inside_the_folder(filename, home):
    with pytest.raises(UsageError, match=r"leads out of the folder. Fix: dirpath"):
        ModelCheckpoint(dirpath=home, filename=filename)
