"""``geartrain plugins lock`` and ``--locked``."""

import json
import sys

import pytest

from geartrain import UsageError
from geartrain_cli.lock import Locked

SOURCE = "class Gauge: ...\n"


@pytest.fixture
def locked(command, install, folder):
    """The lock file's contents, with a plugin of a third party beside geartrain's."""
    install("acme-gauge", SOURCE, plugins={"gauge": "Gauge"})
    done = command("plugins lock")
    assert done.code == 0, done.err
    assert done.out.startswith("geartrain.lock has ")
    return json.loads((folder / "geartrain.lock").read_text())["locked"]


def test_versions_and_code_are_in_the_file_and_nothing_is_imported(locked):
    assert locked["acme-gauge"]["version"] == "1.0"
    assert len(locked["geartrain"]["sha256"]) == len(locked["acme-gauge"]["sha256"]) == 64
    assert locked["torch"].keys() == {"version"}
    assert "acme_gauge" not in sys.modules


def test_a_run_with_the_same_code_starts(locked, fit):
    assert "the module is made" in fit("--locked")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("acme_gauge.py", "acme-gauge 1.0 has other code"),
        ("acme_gauge-1.0.dist-info/METADATA", "acme-gauge is 2.0, and not 1.0"),
    ],
)
def test_changed_code_is_refused(locked, folder, refused, change, words):
    path = folder / "site" / "acme-gauge" / change
    path.write_text(path.read_text().replace("Version: 1.0", "Version: 2.0") + "# edited\n")
    message = refused("fit net.py --max-epochs 1 --locked")
    assert f"geartrain-cli[locked]: the installed plugins are not those of {folder}" in message
    assert f"geartrain.lock: {words}." in message
    assert f"accept the change: geartrain plugins lock {folder / 'geartrain.lock'}" in message


def test_another_set_of_plugins_is_refused(locked, install, folder, refused):
    install("acme-clock", SOURCE, plugins={"clock": "Gauge"})
    (folder / "site" / "acme-gauge" / "acme_gauge-1.0.dist-info" / "METADATA").unlink()
    message = refused("fit net.py --max-epochs 1 --locked")
    assert "acme-clock is not locked; acme-gauge is not installed" in message


def test_a_rank_that_makes_no_plan_checks_too(locked, folder):
    rank = Locked()
    (folder / "site" / "acme-gauge" / "acme_gauge.py").write_text("changed = True\n")
    with pytest.raises(UsageError, match=r"acme-gauge 1\.0 has other code"):
        rank.on_run_start(run=None)


def test_options_of_the_list_are_not_ignored_by_lock(refused):
    for option in ("--json", "--probe", "--block csv"):
        name = option.partition(" ")[0]
        assert f"lock takes no {name}. Fix: " in " ".join(refused(f"plugins lock {option}").split())


def test_a_file_that_is_no_lock_file_is_refused(folder, refused):
    assert "there is no geartrain.lock. Fix: geartrain plugins lock" in " ".join(
        refused("fit net.py --locked").split()
    )
    assert ". is no lock file" in refused("fit net.py --locked --locked.file .")
    for text in ("{", "[]", "{}", '{"locked": 1}'):
        (folder / "other.lock").write_text(text)
        message = refused("fit net.py --locked --locked.file other.lock")
        assert "other.lock is no lock file" in message
    assert "'x' is no action. Fix: geartrain plugins lock [FILE]" in " ".join(
        refused("plugins lock FILE x").split()
    )
