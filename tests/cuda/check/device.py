"""The device of the check, a small model with its data, and the training loop by hand.

``GEARTRAIN_TEST_DEVICE`` names the device. It is ``cuda``, or ``cpu``, which checks the check.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt

DEVICE = os.environ.get("GEARTRAIN_TEST_DEVICE", "cuda")
#: The marks of every file of the check.
ON_DEVICE = [
    pytest.mark.cuda,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"),
]
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"


class Net(gt.Module):
    """A regression on 16 numbers.

    Args:
        dropout: the part of the hidden units that a step drops.
        lr: the learning rate of Adam.
    """

    def __init__(self, dropout: float = 0.0, lr: float = 0.01):
        super().__init__()
        torch.manual_seed(0)
        first, last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)
        self.net = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Dropout(dropout), last)
        self.lr = lr

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def samples(number=64):
    x = torch.randn(number, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def loader(number=64, batch_size=8, **options):
    return DataLoader(samples(number), batch_size=batch_size, **options)


def trainer(**options):
    """Return a Trainer on one device, without a progress bar and a sanity check."""
    return gt.Trainer(
        **{
            "accelerator": DEVICE,
            "devices": 1,
            "strategy": "single",
            "max_epochs": 2,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            "seed": 1,
            **options,
        }
    )


def fit(net=None, data=None, **options):
    """Train and return the module."""
    net = Net() if net is None else net
    trainer(**options).fit(net, loader() if data is None else data)
    return net


def by_hand(net, dtype=None, autocast=None, scaler=None, accumulate=1, clip=None, epochs=2):
    """Train in plain torch on the device, as ``fit`` does with the same options.

    Args:
        dtype: of the weights and batches.
        autocast: the dtype of ``torch.autocast``.
        scaler: a ``torch.amp.GradScaler``.
        accumulate: micro-batches of a step.
        clip: the largest norm of the gradients.
    """
    net.to(DEVICE, dtype)
    optimizer = torch.optim.Adam(net.parameters(), lr=net.lr)
    scaler = torch.amp.GradScaler(DEVICE, enabled=False) if scaler is None else scaler
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader()):
            x, y = x.to(DEVICE, dtype), y.to(DEVICE, dtype)
            context = torch.autocast(DEVICE, autocast) if autocast else contextlib.nullcontext()
            with context:
                loss = torch.nn.functional.mse_loss(net(x), y)
            scaler.scale(loss / accumulate).backward()
            if (index + 1) % accumulate:
                continue
            scaler.unscale_(optimizer)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return net


def assert_equal(found, right, **tolerance):
    """Assert that weights are equal: bit for bit, or within a tolerance of ``assert_close``."""
    found, right = (x if isinstance(x, dict) else x.state_dict() for x in (found, right))
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        # On the CPU, because a run may end with its module on the CPU, and with it on the device.
        a, b = found[name].cpu(), tensor.cpu()
        assert not a.is_floating_point() or a.isfinite().all(), name
        tolerance = tolerance or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(a, b, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def run(*words, code=0, **environ):
    """Run a command in a process of its own, and return what it printed.

    Args:
        words: a program of this folder or ``geartrain``, and its arguments.
        code: its exit code.
        environ: more variables.
    """
    first, *more = map(str, words)
    if first == "geartrain":
        # Beside this Python, or on the path, as after `pip install --target site`.
        folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = [sys.executable, str(shutil.which(first, path=folders))]
    else:
        command = [sys.executable, str(Path(__file__).parent / first)]
    variables = {**os.environ, **environ}
    variables.pop("PYTEST_CURRENT_TEST")  # a program of its own may start itself again
    done = subprocess.run(
        [*command, *more], env=variables, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
