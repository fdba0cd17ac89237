"""The command ``geartrain conformance NAME``."""

import pytest
import several_ranks

from geartrain_testing import command as conformance


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["strategy's name is missing", "geartrain conformance NAME"]),
        ("sngle", ["'sngle'", "'single'"]),
        ("ddp", ["'ddp'", "not installed", "pip install geartrain-ddp"]),
        ("single --without no_such", ["no_such", "no_sync"]),
        ("single --device 2", ["--device", "--devices"]),
        ("single --devices many", ["--devices", "many"]),
        ("single --devices 2", ["geartrain[single] drives one device", "devices=1"]),
        ("scaled --devices 500", ["500 processes"]),
        ("single --convergence -1", ["convergence=-1.0", "above 0"]),
        ("single --deadline 0", ["--deadline 0", "above 0"]),
        ("single --quik", ["--quik", "--quick", "--deadline"]),
        ("single --strategy.depth 3", ["geartrain[single]", "depth"]),
        ("scaled --strategy.scale much", ["geartrain-chip[scaled]", "scale"]),
    ],
)
def test_wrong_conformance_usage_is_refused(chip, refused, line, words):
    message = refused(f"conformance {line}")
    for word in words:
        assert word in message


@pytest.mark.end_to_end
def test_single_passes_the_cases_that_k_chooses(tmp_path):
    done = several_ranks.command(
        tmp_path, "conformance", "single", "--devices", 1, "-k", "metadata"
    )
    assert done.end == "0", done.printed
    assert "1 passed" in done.out


def test_a_failed_case_exits_with_1_and_names_the_folder(command, folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    done = command("conformance single --without uneven_inputs -k 'uneven_inputs or metadata'")
    assert done.code == 1
    (kept,) = folder.glob("geartrain-conformance-*")
    assert "'single' does not conform; pytest printed the failures above." in done.err
    assert f"The tests and their files: {kept}" in done.err
    assert "'uneven_inputs': False" in (kept / "test_conformance.py").read_text()


def test_deadline_and_quick_reach_the_suite(chip, monkeypatch, command):
    ran = []
    monkeypatch.setattr(
        conformance, "_run", lambda name, suite, arguments: ran.append((suite, arguments))
    )
    assert command("conformance single --devices 1").code == 0
    assert (
        command("conformance single --devices 1 --deadline 7.5 --quick -k 'not barrier'").code == 0
    )
    (plain, everything), (suite, (_, chosen)) = ran
    assert ("deadline = 60.0" in plain, everything) == (True, [])
    assert "deadline = 7.5" in suite
    assert chosen.endswith(" and (not barrier)")
    for case in ("communication", "sgd", "metadata"):
        assert case in chosen


def test_k_without_a_match_is_an_error(refused, monkeypatch):
    monkeypatch.setattr(conformance.subprocess, "call", lambda command: 5)  # as pytest ends
    assert "-k matches no test" in refused("conformance single --devices 1 -k no_such_case")
