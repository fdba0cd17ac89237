"""Every test has a wandb of its own: no account, no settings, no folders outside of the test's; and none leaves a process behind."""

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
    for name in ("exit", "excepthook"):  # wandb.init puts its own in their place
        monkeypatch.setattr(sys, name, getattr(sys, name))
    yield
    wandb.teardown()
    assert not services()


def services():
    """wandb's processes below this one."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.name().startswith("wandb")
    ]
