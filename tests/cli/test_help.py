"""``--help`` and ``--help-all``: examples first, the options that people use, as they are typed."""

import re

import pytest


def options(printed):
    """Return each option that the help lists, in order."""
    return re.findall(r"^  (?:-\w, )?(--[\w.-]+)", printed, re.M)


def test_fit_s_help_fits_two_screens_and_begins_with_examples(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = command("fit net.py --help")
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 80
    assert lines[0] == "usage: geartrain fit net.py [options]"
    assert lines[2:4] == ["examples", "  geartrain fit net.py --max-epochs 20 --seed 1"]
    assert {"--max-epochs", "--model.hidden", "--data.batch-size", "--output"} <= {
        *options(done.out)
    }
    assert "--num-sanity-val-steps" not in options(done.out)
    assert "  --help-all   show every option\n" in done.out


def test_every_option_is_listed_once_with_dashes(command):
    for line in ("fit net.py --help", "fit net.py --help-all", "tune lr net.py --help-all"):
        found = options(command(line).out)
        assert len(found) == len(set(found)), line
        assert not [option for option in found if "_" in option]


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "fit net.py --help-all",
        "predict net.py -h",
        "plugins --help",
        "report --help",
        "port -h",
        "new --help",
        "tune --help",
    ],
)
def test_every_width_shows_whole_words(command, monkeypatch, columns, line):
    wide = command(line).out
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = command(line).out
    assert max(map(len, narrow.splitlines())) <= columns
    assert narrow.split() == wide.split()
    assert "``" not in narrow


@pytest.mark.parametrize("name", ["max-epochs", "max_epochs", "data.batch-size", "data.batch_size"])
def test_dashes_and_underscores_are_both_accepted(plan, name):
    facts = plan(f"--{name} 2")
    assert 2 in (facts["options"]["max_epochs"], facts["batch_size"]["per_device"])


def test_the_default_of_an_option_is_told_once(command, write):
    write(
        "deep.py",
        "from net import Net\nclass Deep(Net):\n"
        '    """A deep net.\n\n    Args:\n        width: units; of each layer.\n'
        '        kind: its activation.\n        deep: add layers.\n    """\n'
        "    def __init__(self, width: int, kind: str = 'relu', deep: bool = False): ...\n",
    )
    shown = " ".join(command("fit deep.py --help").out.split())
    assert "module: a deep net --model.width N units; of each layer (required)" in shown
    assert "--model.kind TEXT its activation (default: relu)" in shown
    assert "--model.deep true add layers" in shown


def test_only_a_fit_has_the_options_of_training(command):
    found = {name: options(command(f"{name} net.py --help").out) for name in ("fit", "test")}
    assert "--max-epochs" in found["fit"]
    assert not {"--max-epochs", "--limit-val-batches", "--resume"} & {*found["test"]}
    assert {"--limit-test-batches", "--checkpoint", "--devices"} <= {*found["test"]}


def test_commands_are_listed_in_groups_after_examples(command, install):
    install("geartrain-a", "def command(name, argv): ...\n", commands={"frobnicate": "command"})
    lines = command("--help").out.splitlines()
    titles = [line for line in lines if line in ("examples", "train and evaluate", "look")]
    assert titles == ["examples", "train and evaluate", "look"]
    assert "other commands" in lines
    assert [line for line in lines if line.startswith("  frobnicate")]
