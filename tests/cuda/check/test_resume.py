"""A run that was killed, and goes on: equal in every bit to one that was not."""

import signal
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from .device import DEVICE, ON_DEVICE, assert_equal, run

pytestmark = ON_DEVICE

TARGET = f"{Path(__file__).with_name('programs.py')}:Resumed"
OPTIONS = {
    "accelerator": DEVICE,
    "strategy": "single",
    "devices": 1,
    "max-epochs": 3,
    "accumulate-grad-batches": 3,
    "gradient-clip-val": 0.1,
    "seed": 1,
    "enable-progress-bar": "false",
    # In the middle of the epochs, whose steps are 4.
    "model_checkpoint.every_n_train_steps": 3,
    "model_checkpoint.save_last": "true",
}


def command(folder, *more, code=0):
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    options += ["--plugin", "ema", "--plugin", "model_checkpoint", "--output", folder, *more]
    return run("geartrain", "fit", TARGET, *options, code=code)


def state(folder):
    """Return every tensor of the last checkpoint by its place: weights, averages, random states."""
    last = torch.load(folder / "last.ckpt", weights_only=True, map_location="cpu")
    assert last["step"] == 12
    leaves, _ = tree_flatten_with_path(last)
    tensors = {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    assert any("ema" in place for place in tensors)
    return tensors


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quiet")
    command(folder)
    return state(folder)


def test_a_killed_run_that_resumes(tmp_path, quiet):
    chaos = ["--plugin", "chaos", "--chaos.kill", "step=8"]
    command(tmp_path, *chaos, code=-signal.SIGKILL)
    command(tmp_path, *chaos, "--resume")
    assert_equal(state(tmp_path), quiet)


def test_a_killed_run_that_max_restarts_starts_again(tmp_path, quiet):
    printed = command(
        tmp_path, "--plugin", "chaos", "--chaos.kill", "step=8", "--max-restarts", "1"
    )
    assert "restart 1 of 1" in printed
    assert_equal(state(tmp_path), quiet)
