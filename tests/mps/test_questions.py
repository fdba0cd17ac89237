"""mps before a run: availability, reasons, and the doctor's diagnosis."""

import subprocess
import sys

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
    code = (
        "import torch, threading; from geartrain_mps import MPSAccelerator as A; "
        "before = threading.active_count(); A.unavailable(); A.device_count(); "
        "assert threading.active_count() == before; assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_mps_is_usable_if_torch_finds_the_device(metal):
    assert MPSAccelerator.unavailable() is None
    assert MPSAccelerator.device_count() == 1


@pytest.mark.parametrize(
    ("answers", "words", "absent"),
    [
        (
            {"built": False, "available": False, "macos": ""},
            ["built without MPS"],
            ["macOS 1", "Metal"],
        ),
        (
            {"available": False, "macos": "13.7.4"},
            ["macOS 13.7.4 is too old", "macOS 14"],
            ["Metal"],
        ),
        ({"available": False, "macos": "9"}, ["macOS 9 is too old"], ["Metal"]),
        ({"available": False, "macos": "14.0"}, ["no Metal device", "macOS 14.0"], ["too old"]),
        ({"available": False, "macos": "26.3.1"}, ["no Metal device", "macOS 26.3.1"], ["too old"]),
        # An old Python reads 10.16 on any newer macOS.
        ({"available": False, "macos": "10.16"}, ["no Metal device"], ["too old"]),
        ({"available": False, "macos": ""}, ["no Metal device", "unknown"], ["too old"]),
    ],
)
def test_reasons(metal, answers, words, absent):
    metal.answers(**answers)
    reason = MPSAccelerator.unavailable()
    assert all(word in reason for word in words)
    assert not any(word in reason for word in absent)
    assert MPSAccelerator.device_count() == 0
    with pytest.raises(UsageError) as caught:
        gt.Trainer(accelerator="mps")
    assert f"geartrain-mps[mps] cannot be used here: {reason}" in str(caught.value)


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps"])
def test_chosen_by_name_and_by_priority(metal, accelerator):
    plan = gt.Trainer(accelerator=accelerator, block=["cuda"] if _installed("cuda") else []).plan
    assert (plan.accelerator.label, plan.devices, plan.strategy.name) == (
        "geartrain-mps[mps]",
        (0,),
        "single",
    )
    assert 0 < MPSAccelerator.priority < 30  # between cpu's and cuda's


def _installed(name):
    from geartrain.planning.registry import Registry

    return any(candidate.name == name for candidate in Registry().of("accelerator"))


@pytest.mark.parametrize("devices", [2, "2", [1], "0,1"])
def test_there_is_one_device(metal, devices):
    with pytest.raises(UsageError, match=r"only \[0\] are visible on mps"):
        gt.Trainer(accelerator="mps", devices=devices)
    for same in (1, -1, "auto", [0], "0,"):
        assert gt.Trainer(accelerator="mps", devices=same).plan.devices == (0,)


def test_has_geartrain_s_version_and_its_lazy_name():
    from geartrain.accelerators import MPSAccelerator as lazy

    assert lazy is MPSAccelerator
    assert geartrain_mps.__version__ == gt.__version__


# --- the doctor -----------------------------------------------------------------------------------


def test_diagnosis_of_a_usable_device(metal, monkeypatch):
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.5")
    found = MPSAccelerator.diagnose()
    assert found == {
        "facts": {
            "torch built with MPS": True,
            "macOS": "15.1",
            "PYTORCH_ENABLE_MPS_FALLBACK": "1",
            "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.5",
        },
        "devices": [
            {
                "index": 0,
                "name": "Apple M4",
                "cores": 10,
                "memory_used_mib": 300,
                "memory_total_mib": 10922,
            }
        ],
        "problems": [],
    }


def test_diagnosis_of_an_unusable_device_has_a_fix(metal):
    for answers in ({"macos": "13.1"}, {"macos": "15.0"}, {"built": False}):
        metal.answers(**{"available": False, **answers})
        found = MPSAccelerator.diagnose()
        (problem,) = found["problems"]
        assert ". Fix: " in problem
        assert MPSAccelerator.unavailable() in problem
        assert found["devices"] == []


def _fails(*_):
    raise RuntimeError("Metal is upset")


def test_diagnosis_never_raises(metal, monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", _fails)
    monkeypatch.delattr(torch.backends.mps, "get_core_count")  # older versions of torch lack it
    assert MPSAccelerator.diagnose()["devices"] == [
        {"index": 0, "name": "Apple M4", "memory_used_mib": 300}
    ]
    monkeypatch.setattr(torch.backends.mps, "is_available", _fails)
    found = MPSAccelerator.diagnose()
    assert "Metal is upset" in found["problems"][0]
    assert found["devices"] == []
