"""``geartrain plugins``: the list of installed plugins."""

import re
import sys

import pytest
from command_line import cells

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
    assert cells(done.out, "c") == ["c", "installed", "geartrain-a"]
    assert cells(done.out, "single") == ["single", "blocked", "geartrain", "by --block"]
    assert cells(done.out, "1.0") == ["1.0", "geartrain-a"]
    titles = [line.split()[0] for line in done.out.splitlines() if line[:1].isalpha()]
    assert titles == [
        *("accelerators", "strategies", "precisions", "plugins", "commands", "versions"),
        "installed:",
    ]


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("line", ["plugins --probe", "explain net.py --hooks"])
def test_every_width_shows_whole_words(command, install, monkeypatch, columns, line):
    """As if not wrapped: no word is cut or left out, and no line is longer than the terminal."""
    source = LOUD.format(name="A", reason="no device: see https://example.com/a/long/page#part")
    install(
        "geartrain-a-long-name",
        source,
        accelerators={"far_away": "A"},
        plugins={"a_plugin_with_a_very_long_name": "A"},
    )
    wide = command(line).out
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = command(line).out
    assert max(map(len, narrow.splitlines())) <= columns
    assert not any(text.endswith(" ") for text in narrow.splitlines())
    assert set(narrow.split()) ^ set(wide.split()) <= {"distribution", "reason"}  # headers
    assert not re.search("[│┃─]", narrow)


@pytest.mark.parametrize(
    ("setting", "value"), [("NO_COLOR", "1"), ("FORCE_COLOR", ""), ("TERM", "dumb")]
)
def test_a_pipe_gets_plain_text(command, monkeypatch, setting, value):
    monkeypatch.setenv(setting, value)
    assert "\x1b" not in command("plugins").out


def test_a_terminal_without_colours_gets_none(command, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1m" in command("plugins").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", command("plugins").out)


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
    assert cells(done.out, "absent")[1:] == ["unavailable", "geartrain-a", "no such device"]
    for name, why in {
        "gone": "'B'",
        "broken": "no_such_module_here",
        "quitter": "not today",
        "function": "not a class",
    }.items():
        row = cells(done.out, name)
        assert row[1] == "failed"
        assert why in row[3]
    for name in ("cpu", "single"):
        assert cells(done.out, name)[1:] == ["available", "geartrain"]


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
