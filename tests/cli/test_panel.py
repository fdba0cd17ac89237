"""The panel of an error on the command line."""

import importlib
import sys

import pytest

import geartrain as gt
from geartrain_cli.panel import panel


def caught(raises, kind=gt.UsageError):
    with pytest.raises(kind) as info:
        raises()
    return info.value


def with_note(error):
    error.add_note("said by a plugin")
    return error


def of_itself(error):
    error.__cause__ = error
    return error


OF_A_RANK = "rank 1 failed: x. Fix: y\nTraceback (most recent call last):\n  ..."


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (with_note(gt.UsageError("no. Fix: yes")), "no.\nsaid by a plugin\nFix: yes"),
        (gt.TrainingError(OF_A_RANK), OF_A_RANK),
        (gt.UsageError("\x1b[31mred\r\x9b\tok\n"), "\\x1b[31mred\\r\\x9b\tok\n"),
        (of_itself(gt.UsageError("wrong. Fix: another")), "wrong.\nFix: another"),
    ],
    ids=["a note", "traceback of a rank", "control characters", "its own cause"],
)
def test_text_of_a_panel(error, shown):
    assert panel(error, "geartrain", "-x") == f"geartrain: {shown}"


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
