"""Tests of commands run in a folder with a target; only core and the tools are installed."""

import json

import pytest
from command_line import (
    chip,
    command,
    fit,
    folder,
    install,
    installed,
    plan,
    python,
    refused,
    write,
)

__all__ = [
    "chip",
    "command",
    "fit",
    "folder",
    "install",
    "installed",
    "plan",
    "python",
    "refused",
    "write",
]


@pytest.fixture(autouse=True)
def _a_folder_with_a_target(folder, installed):
    pass


@pytest.fixture
def left(folder):
    """Return a function: ``left("out", "summary.json")`` reads a JSON file of a run."""
    return lambda run, name: json.loads((folder / run / name).read_text())
