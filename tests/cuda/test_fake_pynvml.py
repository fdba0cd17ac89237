"""The fake has the real NVML's functions, so that what is tested against it works against NVML."""

import inspect
import re
from pathlib import Path

import pynvml
import pytest

import geartrain_cuda

from .fake_pynvml import FakeNVML, functions

SOURCE = "\n".join(path.read_text() for path in Path(geartrain_cuda.__file__).parent.glob("*.py"))
NAMES = sorted(
    set(re.findall(r'"(nvml[A-Z]\w+|NVML_\w+)"', SOURCE))
    | set(re.findall(r"pynvml\.(\w+)", SOURCE))
)


def test_names_are_found():
    assert len(NAMES) > 40
    assert {"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "NVMLError_GpuIsLost"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_plugin_uses_is_in_the_real_pynvml_and_in_the_fake(name):
    assert hasattr(pynvml, name)
    assert hasattr(FakeNVML(), name)


@pytest.mark.parametrize("name", sorted(functions(FakeNVML)))
def test_the_fake_takes_what_the_real_one_takes(name):
    def takes(function):
        return [
            (p.name, p.default)
            for p in inspect.signature(function).parameters.values()
            if p.name != "self"
        ]

    assert takes(getattr(FakeNVML, name)) == takes(getattr(pynvml, name))
