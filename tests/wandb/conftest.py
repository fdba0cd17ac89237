"""Each test has a separate wandb: no account, no settings, a temporary folder, no process left."""

import os
import sys

import psutil
import pytest
import wandb


@pytest.fixture(autouse=True)
def own_wandb(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "RANK"]:
        monkeypatch.delenv(name)
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb's own"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB__STATS_SAMPLING_INTERVAL", "0.1")  # seconds; wandb refuses less
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.chdir(tmp_path)
    for name in ("exit", "excepthook"):  # wandb.init replaces both
        monkeypatch.setattr(sys, name, getattr(sys, name))
    yield
    wandb.teardown()
    assert not services()


def services():
    """Return wandb's processes below this process."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.name().startswith("wandb")
    ]
