"""Bagua's environment variables: the bucket size is used, a warning names the others."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain_bagua import Algorithm, BaguaStrategy, environment


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in (*environment.ignored(), environment.BUCKET_SIZE):
        monkeypatch.delenv(name, raising=False)


class Net(gt.Module):
    def training_step(self, batch, batch_idx): ...
    def configure_optimizers(self): ...


def check():
    gt.Trainer(accelerator="cpu", strategy="bagua", devices=2).check(Net)


def test_the_bucket_size_is_baguas(monkeypatch):
    assert environment.bucket_bytes() == 10 * 1024**2
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "4096")
    assert environment.bucket_bytes() == 4096


class Sizes(Algorithm):
    """Records the number of elements of each bucket."""

    found: ClassVar[list[int]] = []

    def set_up(self, context):
        super().set_up(context)
        self.found[:] = [bucket.numel for bucket in context.buckets]


@pytest.mark.parametrize(
    ("variable", "option", "sizes"),
    [
        ("", None, [113]),
        ("100", None, [81, 32]),
        ("100", 4, [1, 8, 8, 64, 8, 24]),
        ("4", 10**6, [113]),
    ],
)
def test_the_option_or_the_variable_sets_the_bucket_size(monkeypatch, variable, option, sizes):
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", variable)
    layers = [nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)]
    strategy = BaguaStrategy(Sizes, bucket_bytes=option)
    trainer = gt.Trainer(
        accelerator="cpu", strategy=strategy, devices=1, max_steps=1, enable_progress_bar=False
    )
    trainer.fit(
        nn.Sequential(*layers),
        [(torch.ones(1, 3), torch.ones(1, 1))],
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
    )
    assert Sizes.found == sizes


@pytest.mark.parametrize("size", ["0", "-1", "10MiB", "1e6"])
def test_an_invalid_bucket_size_is_refused(monkeypatch, size):
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", size)
    with pytest.raises(gt.UsageError, match=r"BAGUA_DEFAULT_BUCKET_SIZE=.* Fix: "):
        check()


def test_variables_without_effect_are_named(monkeypatch):
    monkeypatch.setenv("BAGUA_NET_MIN_CHUNKSIZE", "")
    for name in (
        "BAGUA_AUTOTUNE",
        "AUTO_TUNE_SERVER_ADDR",
        "BAGUA_NET_NSTREAMS",
        "BAGUA_SERVICE_PORT",
        "BAGUA_DEFAULT_BUCKET_SIZE",
    ):
        monkeypatch.setenv(name, "1")
    names = "AUTO_TUNE_SERVER_ADDR, BAGUA_AUTOTUNE, BAGUA_NET_NSTREAMS, BAGUA_SERVICE_PORT"
    with pytest.warns(UserWarning, match=f"{names} has no effect"):
        check()


def test_without_them_there_is_no_warning(monkeypatch, recwarn):
    monkeypatch.setenv("BAGUA_AUTOTUNE", "0")  # Bagua's launcher sets it by default
    check()
    assert not recwarn.list
