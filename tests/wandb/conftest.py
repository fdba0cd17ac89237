"""Each test has a separate wandb: no account, no settings, a temporary folder, no process left."""

import os
import sys
from contextlib import contextmanager

import psutil
import pytest
import wandb


@pytest.fixture(autouse=True)
def own_wandb(tmp_path):
    with separate_wandb(tmp_path):
        yield


@contextmanager
def separate_wandb(folder):
    """Let wandb use only this folder, which is also the working folder."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_") or name == "RANK"]:
            patch.delenv(name)
        for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(folder / "wandb's own"))
        patch.setenv("NETRC", str(folder / "netrc"))
        patch.setenv("WANDB__STATS_SAMPLING_INTERVAL", "0.1")  # seconds; wandb refuses less
        patch.setenv("COLUMNS", "500")
        patch.chdir(folder)
        for name in ("exit", "excepthook"):  # wandb.init replaces both
            patch.setattr(sys, name, getattr(sys, name))
        yield
        wandb.teardown()
        assert not services()


def services():
    """Return wandb's processes below this process."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.name().startswith("wandb")]
