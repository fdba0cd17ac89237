"""The command ``geartrain conformance NAME``."""

import pytest

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


COMMAND = (
    "-c",
    "import sys; from geartrain.commands import main; sys.exit(main())",
    "conformance",
    "single",
)


def test_single_passes_the_cases_that_k_chooses(python, folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(folder))
    done = python(*COMMAND, "-k", "metadata")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert not list(folder.glob("geartrain-conformance-*"))


def test_a_failed_case_exits_with_1_and_names_the_folder(python, folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(folder))
    done = python(*COMMAND, "--without", "uneven_inputs", "-k", "uneven_inputs")
    assert done.returncode == 1
    assert "uneven_inputs is declared unsupported and works" in done.stdout
    (kept,) = folder.glob("geartrain-conformance-*")
    assert "'single' does not conform; pytest printed the failures above." in done.stderr
    assert f"The tests and their files: {kept}" in done.stderr
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


def test_k_without_a_match_is_an_error(refused):
    assert "-k matches no test" in refused("conformance single --devices 1 -k no_such_case")
