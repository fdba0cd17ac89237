"""Tests of commands run in a folder with a target; only core and the tools are installed."""

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
