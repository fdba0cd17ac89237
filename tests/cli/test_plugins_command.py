"""``geartrain plugins``: the list of installed plugins."""

import sys

import pytest

LOUD = """
print("imported")
from geartrain import hookimpl

class {name}:
    priority = 5

    @staticmethod
    def unavailable():
        return {reason!r}

    @staticmethod
    def device_count():
        return 0

    @hookimpl
    def barrier(self):
        pass
"""


@pytest.fixture
def rows(command):
    """Return a function: ``rows("--probe")`` gives the rows of ``geartrain plugins --json``."""
    return lambda options="": {
        row["name"]: row for row in command(f"plugins --json {options}").facts
    }


def test_core_s_own_are_listed_like_any_other(rows):
    found = rows()
    assert {name for name, row in found.items() if row["kind"] in ("accelerator", "strategy")} == {
        "cpu",
        "single",
    }
    assert {"fit", "plugins", "doctor"} <= {
        name for name, row in found.items() if row["kind"] == "command"
    }
    assert {"32-true", "16-mixed"} <= {
        name for name, row in found.items() if row["kind"] == "precision"
    }
    assert {name: row["kind"] for name, row in found.items()}["early_stopping"] == "plugin"
    assert found["cpu"].pop("version")
    assert found["cpu"] == {
        "name": "cpu",
        "kind": "accelerator",
        "state": "installed",
        "reason": "",
        "distribution": "geartrain",
    }
    assert (found["single"]["kind"], found["csv"]["kind"]) == ("strategy", "plugin")


def test_every_installed_one_is_listed_and_none_imported(rows, install):
    install(
        "geartrain-a",
        LOUD.format(name="A", reason=None),
        accelerators={"a": "A"},
        strategies={"b": "A"},
        plugins={"c": "A"},
    )
    found = rows()
    assert {name: found[name]["kind"] for name in "abc"} == {
        "a": "accelerator",
        "b": "strategy",
        "c": "plugin",
    }
    assert {found[name]["state"] for name in "abc"} == {"installed"}
    assert found["c"]["version"] == "1.0"
    assert "geartrain_a" not in sys.modules


def test_table(command, install):
    install("geartrain-a", LOUD.format(name="A", reason=None), plugins={"c": "A"})
    done = command("plugins --block single")
    assert (done.code, done.err) == (0, "")
    lines = {
        tuple(cell.strip() for cell in line.strip("│").split("│"))
        for line in done.out.splitlines()
        if line.startswith("│")
    }
    assert ("c", "plugin", "installed", "", "geartrain-a", "1.0") in lines
    assert ("single", "strategy", "blocked", "by --block") in {line[:4] for line in lines}
    assert {line[0] for line in lines if line[1] in ("accelerator", "strategy")} == {
        "cpu",
        "single",
    }
    assert ("timer", "plugin", "installed", "", "geartrain-callbacks") in {
        line[:5] for line in lines
    }


def test_a_narrow_table_leaves_nothing_out(command, install, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    install(
        "geartrain-a-long-name",
        LOUD.format(name="A", reason=None),
        plugins={"a_plugin_with_a_long_name": "A"},
    )
    assert "…" not in command("plugins").out


def test_probe_imports_each_plugin_and_survives_broken_ones(command, install):
    install(
        "geartrain-a",
        LOUD.format(name="A", reason="no such device"),
        accelerators={"absent": "A", "gone": "B"},
    )
    install("geartrain-b", "import no_such_module_here\n", strategies={"broken": "B"})
    install("geartrain-c", "import sys\nsys.exit('not today')\n", plugins={"quitter": "C"})
    install("geartrain-d", "def make(): ...\n", plugins={"function": "make"})
    done = command("plugins --probe")
    assert done.code == 0
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in done.out.splitlines()
        if line.startswith("│")
    ]
    found = {name: (state, reason) for name, _, state, reason, *_ in cells}
    assert found["absent"] == ("unavailable", "no such device")
    for name, why in {
        "gone": "'B'",
        "broken": "no_such_module_here",
        "quitter": "not today",
        "function": "not a class",
    }.items():
        assert found[name][0] == "failed"
        assert why in found[name][1]
    assert found["cpu"] == found["single"] == ("available", "")


def test_json_stays_json_when_a_plugin_prints_at_import(rows, install):
    """Vendors' libraries print at import."""
    install("geartrain-a", LOUD.format(name="A", reason=None), plugins={"c": "A"})
    assert rows("--probe")["c"]["state"] == "available"


def test_block_by_option_and_by_environment(rows, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_BLOCK", "single, nobody")
    found = rows("--block CPU")
    assert (found["cpu"]["state"], found["cpu"]["reason"]) == ("blocked", "by --block")
    assert (found["single"]["state"], found["single"]["reason"]) == (
        "blocked",
        "by GEARTRAIN_BLOCK",
    )


def test_block_by_distribution_and_name(command, plan, install):
    install("acme", "class A: ...\n", accelerators={"cpu": "A"})
    states = {
        row["distribution"]: row["state"]
        for row in command("plugins --json --block acme[cpu]").facts
        if row["name"] == "cpu"
    }
    assert states == {"geartrain": "installed", "acme": "blocked"}
    assert plan("--block acme[cpu]")["passed_over"]["acme[cpu]"] == "blocked: by --block"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--block cppu", "'cpu'"),
        ("--probes", "--probe"),
        ("--js", "--json"),
        ("--block", "--block"),
        ("net.py", "net.py"),
    ],
)
def test_wrong_usage(refused, words, expected):
    assert expected in refused(f"plugins {words}")


def test_help(command):
    done = command("plugins --help")
    assert done.code == 0
    for option in ("--json", "--probe", "--block NAME"):
        assert option in done.out
