"""Checkpoints that another device wrote."""

import pytest
import torch

from .device import DEVICE, ON_DEVICE, Net, assert_equal, fit, loader, run, trainer

pytestmark = ON_DEVICE


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a run on the device, and its module."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, fit(max_epochs=1, output=folder)


def test_load_from_checkpoint_on_the_cpu(trained):
    folder, net = trained
    loaded = Net.load_from_checkpoint(folder / "last.ckpt")
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}
    assert_equal(loaded, net)


def test_safetensors(trained, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    folder, net = trained
    run("geartrain", "ckpt", "export", folder / "last.ckpt", tmp_path / "net.safetensors")
    assert_equal(load_file(tmp_path / "net.safetensors"), net)


@pytest.mark.parametrize("first", ["cpu", DEVICE])
def test_a_fit_resumes_on_another_device(tmp_path, first):
    fit(max_epochs=1, output=tmp_path, accelerator=first)
    net = Net()
    one = trainer(output=tmp_path, accelerator=DEVICE if first == "cpu" else "cpu")
    one.fit(net, loader(), ckpt_path="last")
    assert one.global_step == 16
    assert_equal(net, fit(accelerator="cpu"), rtol=1e-4, atol=1e-5)


def test_an_evaluation_reads_a_checkpoint_of_the_cpu(tmp_path):
    fit(max_epochs=1, output=tmp_path, accelerator="cpu")
    (on_cpu,) = trainer(accelerator="cpu").test(Net(), loader(), ckpt_path=tmp_path / "last.ckpt")
    (found,) = trainer().test(Net(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert found["test_loss"] == pytest.approx(on_cpu["test_loss"], rel=1e-4)
    assert torch.tensor(found["test_loss"]).isfinite()
