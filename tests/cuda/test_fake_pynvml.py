"""The fake NVML has the functions of the real one, so tests with it hold for the real one."""

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


@pytest.mark.parametrize("module", [pynvml, FakeNVML()])
def test_the_real_pynvml_and_the_fake_have_every_name_of_the_plugin(module):
    assert len(NAMES) > 40
    assert [name for name in NAMES if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", sorted(functions(FakeNVML)))
def test_the_fakes_functions_have_the_parameters_of_the_real_ones(name):
    def parameters(function):
        found = inspect.signature(function).parameters.values()
        return [(each.name, each.default) for each in found if each.name != "self"]

    assert parameters(getattr(FakeNVML, name)) == parameters(getattr(pynvml, name))
