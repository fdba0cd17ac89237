"""Precisions, commands and hookspecs of third parties, installed from their wheels."""

import json

import pytest

STALLED = """
from geartrain import hookimpl

@hookimpl
def on_epoch_end(run):
    run.hooks.on_stall(run=run, epochs=3)

@hookimpl
def on_stall(epochs):
    print("stalled for", epochs)
"""


# --- a precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        [],
        pytest.param(
            ["--strategy", "ddp_spawn", "--accelerator", "cpu", "--devices", "2"],
            marks=pytest.mark.end_to_end,
        ),
    ],
    ids=["single", "ddp_spawn"],
)
def test_a_precision_does_its_work_in_every_rank(fit, strategy):
    """Gradients of (3, 4) are rounded to (4, 4); two ranks take two steps each."""
    run = fit("--precision", "even", *strategy)
    assert run.weights == ([4.0, 4.0] if strategy else [8.0, 8.0])
    precision = run.plan["precision"]
    assert (precision["name"], precision["distribution"], precision["version"]) == (
        "even",
        "even-precision",
        "0.1.0",
    )


# --- a command ------------------------------------------------------------------------------------


def test_a_command_is_listed_with_the_summary_of_its_distribution(geartrain):
    (row,) = (
        row
        for row in json.loads(geartrain("plugins", "--json").stdout)
        if row["name"] == "last-words"
    )
    assert (row["kind"], row["distribution"]) == ("command", "last-words")
    assert (
        "last-words  The command geartrain last-words: the status that a run ended with"
        in geartrain("--help").stdout
    )


def test_a_command_runs(fit, geartrain):
    fit()
    done = geartrain("last-words", "out")
    assert (done.returncode, done.stdout) == (0, "done\n")


# --- hookspecs ------------------------------------------------------------------------------------


def test_a_package_of_hookspecs_lets_a_plugin_implement_them(fit, tmp_path):
    (tmp_path / "stalled.py").write_text(STALLED)
    assert "stalled for 3" in fit("--plugin", "stall_hooks", "--plugin", "stalled.py").printed


def test_an_error_says_that_another_plugin_may_add_a_missing_hook(refused, tmp_path):
    (tmp_path / "stalled.py").write_text(STALLED)
    assert "If it is a hook of another plugin or strategy, choose that one too" in refused(
        "--plugin", "stalled.py"
    )
