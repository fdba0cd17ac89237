"""Bagua's environment variables: the bucket size is honoured, the others are named."""

import pytest

import geartrain as gt
from geartrain_bagua import environment


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


@pytest.mark.parametrize("size", ["0", "-1", "10MiB", "1e6"])
def test_a_bucket_size_that_is_none_is_refused(monkeypatch, size):
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", size)
    with pytest.raises(gt.UsageError, match=r"BAGUA_DEFAULT_BUCKET_SIZE=.* Fix: "):
        check()


def test_variables_that_change_nothing_are_named(monkeypatch):
    monkeypatch.setenv("BAGUA_NET_MIN_CHUNKSIZE", "")
    for name in ("BAGUA_AUTOTUNE", "AUTO_TUNE_SERVER_ADDR", "BAGUA_NET_NSTREAMS", "BAGUA_SERVICE_PORT", "BAGUA_DEFAULT_BUCKET_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match=r"AUTO_TUNE_SERVER_ADDR, BAGUA_AUTOTUNE, BAGUA_NET_NSTREAMS, BAGUA_SERVICE_PORT changes nothing"):
        check()


def test_without_them_there_is_no_warning(monkeypatch, recwarn):
    monkeypatch.setenv("BAGUA_AUTOTUNE", "0")  # as Bagua's launcher sets it where nobody asked for it
    check()
    assert not recwarn.list
