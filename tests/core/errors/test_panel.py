"""The panel of a usage error that a script does not catch."""

import importlib
import os
import subprocess
import sys

import pytest

import geartrain as gt
from geartrain.errors.panel import panel

SCRIPT = """\
import geartrain as gt

def make():
    return gt.Trainer(accelerator="cpu", strategy="sngle")

make()
"""


def run(folder, source=SCRIPT, **environment):
    (folder / "train.py").write_text(source)
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_a_script_shows_the_message_its_own_line_and_how_to_see_the_rest(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "geartrain: there is no strategy 'sngle'. Did you mean 'single'?",
        '  train.py:4: return gt.Trainer(accelerator="cpu", strategy="sngle")',
        "The whole traceback: GEARTRAIN_TRACEBACK=1",
    ]


def test_the_variable_shows_the_whole_traceback(tmp_path):
    done = run(tmp_path, GEARTRAIN_TRACEBACK="1")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "in select" in done.stderr
    assert done.stderr.endswith(
        "geartrain.errors.UsageError: there is no strategy 'sngle'. Did you mean 'single'?\n"
    )


def test_other_errors_are_pythons(tmp_path):
    done = run(tmp_path, "import geartrain\nraise ValueError('mine')\n")
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ValueError: mine\n")


def caught(raises, kind=gt.UsageError):
    with pytest.raises(kind) as info:
        raises()
    return info.value


def test_notes_and_the_fix():
    error = gt.UsageError("no. Fix: yes")
    error.add_note("said by a plugin")
    assert panel(error, "geartrain", "-x") == "geartrain: no.\nsaid by a plugin\nFix: yes"


def test_the_traceback_of_another_rank_stays_in_one_piece():
    text = "rank 1 failed: x. Fix: y\nTraceback (most recent call last):\n  ..."
    assert panel(gt.TrainingError(text), "geartrain", "-x") == f"geartrain: {text}"


def test_control_characters_are_escaped():
    assert (
        panel(gt.UsageError("\x1b[31mred\r\x9b\tok\n"), "geartrain", "-x")
        == "geartrain: \\x1b[31mred\\r\\x9b\tok\n"
    )


def test_frames_of_installed_packages_are_not_the_users():
    def raises():
        pytest.importorskip("yaml").safe_load(Broken())

    class Broken:
        def read(self, size):
            return gt.Trainer(strategy="sngle")  # the user's line, under yaml's frames

    text = panel(caught(raises), "geartrain", "-x")
    assert "the user's line" in text
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize("installed", [True, False])
def test_packages_that_stand_beside_their_metadata_are_installed(tmp_path, monkeypatch, installed):
    """A package as from ``pip install --target``."""
    (tmp_path / "gearpkg").mkdir()
    (tmp_path / "gearpkg" / "__init__.py").touch()
    (tmp_path / "gearpkg" / "deep.py").write_text("def fail(error):\n    raise error\n")
    if installed:
        (tmp_path / "gearpkg-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gearpkg", raising=False)
    monkeypatch.delitem(sys.modules, "gearpkg.deep", raising=False)
    fail = importlib.import_module("gearpkg.deep").fail
    text = panel(caught(lambda: fail(gt.UsageError("no"))), "geartrain", "-x")
    assert ("deep.py:2: raise error" in text) is not installed


def test_a_notebook_shows_it_too():
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    assert (
        "_render_traceback_"
        in shell.showtraceback.__code__.co_consts + shell.showtraceback.__code__.co_names
    )
    lines = caught(lambda: gt.Trainer(strategy="sngle"))._render_traceback_()
    assert lines[0] == "geartrain: there is no strategy 'sngle'. Did you mean 'single'?"
    assert "Traceback" not in lines[1]


def test_an_error_that_is_its_own_cause_has_a_panel():
    error = gt.UsageError("wrong. Fix: another")
    error.__cause__ = error
    assert panel(error, "geartrain", "-x") == "geartrain: wrong.\nFix: another"
