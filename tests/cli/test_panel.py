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


def test_an_error_that_is_its_own_cause_has_a_panel():
    error = gt.UsageError("wrong. Fix: another")
    error.__cause__ = error
    assert panel(error, "geartrain", "-x") == "geartrain: wrong.\nFix: another"
