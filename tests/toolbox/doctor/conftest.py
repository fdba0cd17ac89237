"""Run each doctor test in a folder with a target; only core and the tools count as installed."""

import copy
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import command, folder, install, installed, python, refused, write

from geartrain_testing.launching import HAS_PROC, listening
from geartrain_tools.doctor import all_reduce_check

__all__ = ["command", "folder", "install", "installed", "python", "refused", "write"]


@pytest.fixture(autouse=True)
def _a_folder_with_a_target(folder, installed):
    pass


def traces():
    """Return this process's children, the ports on which it listens, and its handler of SIGTERM."""
    stats = Path("/proc").glob("[0-9]*/stat")
    parents = (path.read_text().rpartition(")")[2].split()[1] for path in stats)
    children = sum(parent == str(os.getpid()) for parent in parents)
    ports = listening([os.getpid()]) if HAS_PROC else None
    return children, ports, signal.getsignal(signal.SIGTERM)


@pytest.fixture(scope="session")
def all_reduced(tmp_path_factory):
    """Facts of the doctor's all-reduce on this machine; :func:`traces` before it and after it."""
    folder = tmp_path_factory.mktemp("all_reduce")
    (folder / "random.py").write_text("raise SystemExit('imported by mistake')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        before = traces()
        facts = all_reduce_check.all_reduce("gloo", "cpu")
    return SimpleNamespace(facts=facts, before=before, after=traces())


@pytest.fixture
def known_all_reduce(all_reduced, monkeypatch):
    """Replay the result of ``all_reduced`` without processes: for tests of the other checks."""
    monkeypatch.setattr(
        all_reduce_check, "all_reduce", lambda backend, device: copy.deepcopy(all_reduced.facts)
    )
