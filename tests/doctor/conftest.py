"""Run each doctor test in a folder with a target; only core and the tools count as installed."""

import copy

import pytest
from command_line import command, folder, install, installed, python, refused, write

from geartrain_doctor import all_reduce_check

__all__ = ["command", "folder", "install", "installed", "python", "refused", "write"]


@pytest.fixture(autouse=True)
def _a_folder_with_a_target(folder, installed):
    pass


@pytest.fixture(scope="session")
def all_reduced():
    """Result of the doctor's all-reduce between two processes on this machine."""
    return all_reduce_check.all_reduce("gloo", "cpu")


@pytest.fixture
def known_all_reduce(all_reduced, monkeypatch):
    """Replay the result of ``all_reduced`` without processes: for tests of the other checks."""
    monkeypatch.setattr(
        all_reduce_check, "all_reduce", lambda backend, device: copy.deepcopy(all_reduced)
    )
