"""CUDA_VISIBLE_DEVICES: valid and invalid values, compared with torch, and any other text."""

import os
import warnings
from unittest import mock

import pynvml
import pytest
import torch
from hypothesis import example, given, strategies as st

from geartrain_cuda import CUDAAccelerator, find_usable_cuda_devices
from geartrain_cuda.nvml import session
from geartrain_cuda.visible import view

from .fake_pynvml import FakeGPU, FakeNVML

UUIDS = ["GPU-5d5ba0d6-d33d", "GPU-0aa11ebd-627f", "GPU-08279800-1cbe", "GPU-71086aca-c858"]
NEW, OLD = "570.86.10", "535.129.03"


def shown(variable, *, fake=None, **environ):
    """Return (physical indices or MIG UUIDs of the visible devices, the problem)."""
    fake = fake or FakeNVML(*map(FakeGPU, UUIDS))
    if variable is not None:
        environ["CUDA_VISIBLE_DEVICES"] = variable
    with mock.patch.dict("sys.modules", pynvml=fake), session() as nvml:
        seen = view(nvml, environ)
        return [gpu.index if gpu.parent is None else gpu.uuid for gpu in seen.devices], seen.problem


@pytest.mark.parametrize(
    ("variable", "means", "entry"),
    [
        (None, [0, 1, 2, 3], None),
        ("", [], None),
        ("-1", [], None),
        ("2, 1", [2, 1], None),
        ("0,2,-1,1", [0, 2], None),
        ("0,", [0], None),
        ("+1", [1], None),
        ("001", [1], None),
        ("GPU-5d5ba0d6-d33d", [0], None),
        ("GPU-71,GPU-0aa", [3, 1], None),
        ("0,9,1", [0], "'9'"),
        ("1,nonsense,0", [1], "'nonsense'"),
        ("0,,1", [0], "''"),
        ("1,2,01", [], "'01'"),
        ("0,-2", [0], "'-2'"),
        ("9" * 5000, [], "999"),
        ("GPU-", [], "'GPU-'"),
        ("GPU-0,GPU-71", [], "'GPU-0'"),
        ("GPU-71,GPU-none,GPU-5d", [3], "'GPU-none'"),
        ("GPU-71,1", [3], "'1'"),
        ("1,GPU-71", [1], "'GPU-71'"),
        ("GPU-71, GPU-5d", [3], "' GPU-5d'"),
        ("GPU-71,GPU-71", [], "'GPU-71'"),
        ("GPU-71,GPU-710", [], "'GPU-710'"),
        ("MIG-71", [], "'MIG-71'"),
        ("cuda:0", [], "'cuda:0'"),
    ],
)
def test_a_value_shows_gpus_and_an_invalid_entry_is_named(variable, means, entry):
    devices, problem = shown(variable)
    assert devices == means
    assert (problem is None) == (entry is None)
    assert entry is None or (entry in problem and "Fix: " in problem)


# --- the same reading as torch's ------------------------------------------------------------------


def as_torch_reads(variable):
    with (
        mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": variable}),
        mock.patch.object(torch.cuda, "_raw_device_count_nvml", return_value=len(UUIDS)),
        mock.patch.object(torch.cuda, "_raw_device_uuid_nvml", return_value=UUIDS),
    ):
        count = torch.cuda._device_count_nvml()
        return [torch.cuda._get_nvml_device_index(i) for i in range(count)] if count else []


entries = st.one_of(
    st.integers(-3, 6).map(str),
    st.sampled_from(["", " ", "1gpu2", "0x1", "junk", "-0", "+2", "0 1", " 3 ", "1.5", "00"]),
    st.sampled_from([uuid[:length] for uuid in UUIDS for length in (4, 5, 6, 7, 17)]),
    st.text("GPU-012 ,+x", max_size=4),
)


@given(st.lists(entries, max_size=5).map(",".join).filter(lambda text: not text.startswith("MIG-")))
@example("GPU-0,GPU-5")
@example("9,9")
@example("0,9,9")
@example("-0,0")
def test_numbers_and_uuids_mean_the_same_gpus_as_in_torch(text):
    try:
        right = as_torch_reads(text)
    except ValueError:  # torch fails for a sign without a number; for CUDA it is an invalid entry
        right = None
    devices, _ = shown(text)
    assert right is None or devices == right


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
    | st.lists(entries | st.just("MIG-x")).map(",".join)
)
@example("MIG-GPU-5d5ba0d6-d33d/1/²")
@example("²")
@example("MIG-GPU-")
def test_any_text_gives_devices_and_a_problem_with_a_fix(text):
    instances = [FakeGPU("MIG-1", gi=1), None, FakeGPU("MIG-2", gi=2)]
    fake = FakeNVML(
        FakeGPU("GPU-1"), FakeGPU("GPU-2", instances=instances), FakeGPU("GPU-3", instances=[])
    )
    devices, problem = shown(text, fake=fake)
    assert len(set(devices)) == len(devices)
    assert set(devices) <= {0, "MIG-1", "MIG-2"}
    assert problem is None or "Fix: " in problem


# --- MIG ------------------------------------------------------------------------------------------


def mig(driver=NEW):
    """Return a fake NVML with three GPUs.

    GPU 0 is not in MIG mode. GPU 1 has three GPU instances; the last one has two compute instances.
    GPU 2 is in MIG mode without instances.
    """
    instances = [
        FakeGPU("MIG-aaaa", gi=1),
        None,
        FakeGPU("MIG-aabb", gi=2),
        FakeGPU("MIG-cccc", gi=3, ci=0),
        FakeGPU("MIG-dddd", gi=3, ci=1),
    ]
    return FakeNVML(
        FakeGPU("GPU-aaaa-1"),
        FakeGPU("GPU-aabb-2", instances=instances),
        FakeGPU("GPU-cccc-3", instances=[]),
        driver=driver,
    )


@pytest.mark.parametrize(
    ("variable", "new", "old"),
    [
        (None, [0, "MIG-aaaa", "MIG-aabb", "MIG-cccc"], ["MIG-aaaa"]),
        ("0", [0], [0]),
        ("1", ["MIG-aaaa", "MIG-aabb", "MIG-cccc"], ["MIG-aaaa"]),
        ("1,0", ["MIG-aaaa", "MIG-aabb", "MIG-cccc", 0], ["MIG-aaaa"]),
        ("GPU-aabb", ["MIG-aaaa", "MIG-aabb", "MIG-cccc"], ["MIG-aaaa"]),
        ("2", [], []),
        ("2,0", [0], [0]),
        ("MIG-aabb", ["MIG-aabb"], ["MIG-aabb"]),
        ("MIG-aab", ["MIG-aabb"], ["MIG-aabb"]),
        ("MIG-dddd", ["MIG-dddd"], ["MIG-dddd"]),
        ("MIG-aabb,MIG-aaaa", ["MIG-aabb", "MIG-aaaa"], ["MIG-aabb"]),
        ("MIG-dddd,MIG-cccc,MIG-aaaa", ["MIG-dddd", "MIG-aaaa"], ["MIG-dddd"]),
        ("MIG-GPU-aabb-2/3/1", ["MIG-dddd"], ["MIG-dddd"]),
        ("MIG-GPU-aab/2/0", ["MIG-aabb"], ["MIG-aabb"]),
        ("MIG-GPU-aabb-2/9/0", [], []),
        ("MIG-GPU-aabb-2/٢/0", [], []),  # digits, but not CUDA's
        ("MIG-GPU-aaaa-1/1/0", [], []),
        ("MIG-a", [], []),
        ("MIG-aaaa,MIG-aaaa", [], []),
    ],
)
def test_mig_instances_are_shown_as_cuda_shows_them(variable, new, old):
    assert shown(variable, fake=mig(NEW))[0] == new
    assert shown(variable, fake=mig(OLD))[0] == old


def test_the_problem_of_an_old_driver_names_the_hidden_devices():
    assert "only one MIG instance, and no other GPU" in shown(None, fake=mig(OLD))[1]
    assert "Fix: " in shown("MIG-aabb,MIG-aaaa", fake=mig(OLD))[1]
    assert shown(None, fake=mig(NEW))[1] is None
    assert shown("MIG-aabb", fake=mig(OLD))[1] is None


def test_two_instances_of_one_gpu_instance_are_one_device():
    assert "share a GPU instance" in shown("MIG-dddd,MIG-cccc", fake=mig(NEW))[1]


def test_all_instances_with_an_unknown_place_are_shown():
    error = {"nvmlDeviceGetGpuInstanceId": pynvml.NVML_ERROR_NO_PERMISSION}
    instances = [FakeGPU("MIG-1", errors=error), FakeGPU("MIG-2", errors=error)]
    fake = FakeNVML(FakeGPU("GPU-1", instances=instances), driver=NEW)
    assert shown(None, fake=fake)[0] == ["MIG-1", "MIG-2"]


# --- CUDA_DEVICE_ORDER ----------------------------------------------------------------------------

LOST = {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}
MIXED = [FakeGPU("GPU-1", "NVIDIA T4"), FakeGPU("GPU-2", "NVIDIA A100")]


@pytest.mark.parametrize(
    ("gpus", "environ", "uncertain"),
    [
        (MIXED, {}, True),
        (MIXED, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, True),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "1"}, True),
        (MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-1"}, False),
        ([FakeGPU("GPU-1"), FakeGPU("GPU-2")], {}, False),
        ([FakeGPU("GPU-1"), FakeGPU("GPU-2", errors=LOST)], {}, False),
    ],
)
def test_indices_of_different_models_are_uncertain(gpus, environ, uncertain):
    with mock.patch.dict("sys.modules", pynvml=FakeNVML(*gpus)), session() as nvml:
        order = view(nvml, environ).order
    assert (order is not None) == uncertain
    if uncertain:
        assert "NVIDIA A100, NVIDIA T4" in order
        assert "Fix: export CUDA_DEVICE_ORDER=PCI_BUS_ID" in order


def test_find_usable_cuda_devices_warns_of_an_uncertain_order_once(machine):
    machine(*MIXED)
    with pytest.warns(UserWarning, match="PCI_BUS_ID"):
        assert find_usable_cuda_devices() == [0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_usable_cuda_devices()


def test_device_count_counts_the_visible_devices(machine, monkeypatch):
    machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,7,0")
    assert CUDAAccelerator.device_count() == 2
