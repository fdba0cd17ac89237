"""mps before a run: availability, reasons, and the doctor's diagnosis."""

import threading

import pytest
import torch

import geartrain as gt
import geartrain_mps
from geartrain import UsageError
from geartrain_mps import MPSAccelerator


@pytest.mark.skipif(torch.backends.mps.is_built(), reason="this torch is built with MPS")
def test_a_torch_without_mps_is_the_reason():
    reason = MPSAccelerator.unavailable()
    assert torch.__version__ in reason
    assert "built without MPS" in reason
    assert MPSAccelerator.device_count() == 0
    with pytest.raises(
        UsageError, match=r"geartrain-mps\[mps\] cannot be used here: .*built without MPS"
    ):
        gt.Trainer(accelerator="MPS")
    found = MPSAccelerator.diagnose()
    assert (found["facts"]["torch built with MPS"], found["devices"]) == (False, [])
    assert "built without MPS" in found["problems"][0]


def test_the_check_starts_no_thread_and_no_device():
    """``accelerator="auto"`` runs this check, and the process may fork afterwards."""
    before = threading.active_count()
    MPSAccelerator.unavailable()
    MPSAccelerator.device_count()
    assert threading.active_count() == before
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("built", "macos", "words", "absent"),
    [
        (False, "", ["built without MPS"], ["macOS 1", "Metal"]),
        (True, "13.7.4", ["macOS 13.7.4 is too old", "macOS 14"], ["Metal"]),
        (True, "9", ["macOS 9 is too old"], ["Metal"]),
        (True, "14.0", ["no Metal device", "macOS 14.0"], ["too old"]),
        (True, "26.3.1", ["no Metal device", "macOS 26.3.1"], ["too old"]),
        (True, "10.16", ["no Metal device"], ["too old"]),  # an old Python on any newer macOS
        (True, "", ["no Metal device", "unknown"], ["too old"]),
    ],
)
def test_reasons(metal, built, macos, words, absent):
    metal.answers(built=built, available=False, macos=macos)
    reason = MPSAccelerator.unavailable()
    assert all(word in reason for word in words)
    assert not any(word in reason for word in absent)
    assert MPSAccelerator.device_count() == 0
    with pytest.raises(UsageError) as caught:
        gt.Trainer(accelerator="mps")
    assert f"geartrain-mps[mps] cannot be used here: {reason}" in str(caught.value)
    found = MPSAccelerator.diagnose()
    (problem,) = found["problems"]
    assert ". Fix: " in problem
    assert reason in problem
    assert found["devices"] == []


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps"])
def test_chosen_by_name_and_by_priority(metal, accelerator):
    plan = gt.Trainer(accelerator=accelerator, block=["cuda"] if _installed("cuda") else []).plan
    assert (plan.accelerator.label, plan.strategy.name) == ("geartrain-mps[mps]", "single")
    assert plan.devices == (0,)
    assert 0 < MPSAccelerator.priority < 30  # between cpu's and cuda's
    with pytest.raises(UsageError, match=r"only \[0\] are visible on mps"):
        gt.Trainer(accelerator="mps", devices=2)


def _installed(name):
    from geartrain.planning.registry import Registry

    return any(candidate.name == name for candidate in Registry().of("accelerator"))


# --- the doctor -----------------------------------------------------------------------------------


def test_diagnosis_of_a_usable_device(metal, monkeypatch):
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.5")
    found = MPSAccelerator.diagnose()
    assert found["problems"] == []
    assert found["facts"] == {
        "torch built with MPS": True,
        "macOS": "15.1",
        "PYTORCH_ENABLE_MPS_FALLBACK": "1",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.5",
    }
    memory = {"memory_used_mib": 300, "memory_total_mib": 10922}
    assert found["devices"] == [{"index": 0, "name": "Apple M4", "cores": 10, **memory}]


def _fails(*_):
    raise RuntimeError("Metal is upset")


def test_diagnosis_never_raises(metal, monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", _fails)
    monkeypatch.delattr(torch.backends.mps, "get_core_count")  # older versions of torch lack it
    (device,) = MPSAccelerator.diagnose()["devices"]
    assert device == {"index": 0, "name": "Apple M4", "memory_used_mib": 300}
    monkeypatch.setattr(torch.backends.mps, "is_available", _fails)
    found = MPSAccelerator.diagnose()
    assert "Metal is upset" in found["problems"][0]
    assert found["devices"] == []


def test_version_is_geartrains():
    assert geartrain_mps.__version__ == gt.__version__
