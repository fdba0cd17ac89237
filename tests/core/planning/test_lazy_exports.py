"""Names of installed distributions, and the imports that they avoid."""

import importlib
import subprocess
import sys

import pytest

import geartrain
import geartrain.accelerators
import geartrain.strategies
from geartrain.builtin.cpu import CPUAccelerator
from geartrain.builtin.single import SingleDeviceStrategy

from ..contract_fixtures import dists as dists

CUDA = """
class CUDAAccelerator: ...
def find_usable_cuda_devices(n=-1):
    return [0, 1]
"""


def run(code):
    """Run code in a new interpreter; return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- geartrain ------------------------------------------------------------------------------------


def test_imports_and_hookimpl_bring_no_torch():
    """tests/discovery checks more imports."""
    code = "geartrain.strategies, geartrain.accelerators, geartrain as g; g.hookimpl, dir(g)"
    assert run(f"import sys, {code}; print('torch' in sys.modules)") == "False"


def test_import_replaces_no_exception_hook():
    code = "import sys; hook = sys.excepthook; import geartrain; print(sys.excepthook is hook)"
    assert run(code) == "True"


def test_every_public_name_resolves():
    namespace = {}
    exec("from geartrain import *", namespace)
    assert namespace.keys() >= {*geartrain.__all__}
    assert {*dir(geartrain)} >= {*geartrain.__all__}
    assert namespace["Module"].__module__ == "geartrain.module.module"


@pytest.mark.parametrize("module", ["callbacks", "tuning", "testing", "parallel"])
def test_all_names_of_a_distribution_can_be_imported(module):
    namespace = {}
    exec(f"from geartrain.{module} import *", namespace)
    assert namespace.keys() >= {*importlib.import_module(f"geartrain.{module}").__all__}


def test_lightnings_names_are_the_same_classes():
    assert geartrain.LightningModule is geartrain.Module
    assert geartrain.LightningDataModule is geartrain.DataModule


def test_unknown_name_of_geartrain():
    assert not hasattr(geartrain, "Trainre")
    with pytest.raises(AttributeError, match="Trainre"):
        _ = geartrain.Trainre
    with pytest.raises(ImportError, match="Trainre"):
        from geartrain import Trainre  # noqa: F401


# --- geartrain.strategies, geartrain.accelerators -------------------------------------------------


def test_cores_own_classes_are_found_by_their_entry_points(dists):
    from geartrain.accelerators import CPUAccelerator as cpu
    from geartrain.strategies import SingleDeviceStrategy as single

    assert (cpu, single) == (CPUAccelerator, SingleDeviceStrategy)
    assert dir(geartrain.strategies) == ["SingleDeviceStrategy"]
    assert dir(geartrain.accelerators) == ["CPUAccelerator"]


def test_installed_class_is_found_and_no_other_imported(dists):
    ddp = dists.strategy("ddp", cls="DDPStrategy")
    broken = dists.add("acme-broken", "1 / 0", strategies={"broken": "Broken"})
    from geartrain.strategies import DDPStrategy

    assert DDPStrategy is sys.modules[ddp].DDPStrategy
    assert broken not in sys.modules
    assert dir(geartrain.strategies) == ["Broken", "DDPStrategy", "SingleDeviceStrategy"]


def test_class_of_our_distribution_wins_over_others_of_its_name(dists):
    theirs = dists.add("acme", "class DDPStrategy: ...", strategies={"acme_ddp": "DDPStrategy"})
    ours = dists.strategy("ddp", cls="DDPStrategy")
    assert geartrain.strategies.DDPStrategy is sys.modules[ours].DDPStrategy
    assert theirs not in sys.modules


def test_class_of_core_wins_over_others_of_its_name(dists):
    dists.add("acme", "class CPUAccelerator: ...", accelerators={"acme": "CPUAccelerator"})
    assert geartrain.accelerators.CPUAccelerator is CPUAccelerator


def test_class_of_our_name_alone_is_not_taken_for_ours(dists):
    module = dists.add("acme", "class DDPStrategy: ...", strategies={"acme": "DDPStrategy"})
    with pytest.raises(ImportError, match=r"not installed. Fix: pip install geartrain-ddp$"):
        _ = geartrain.strategies.DDPStrategy
    assert module not in sys.modules


def test_helper_is_of_our_distribution(dists):
    dists.add("geartrain-cuda", CUDA, accelerators={"cuda": "CUDAAccelerator"})
    dists.add("acme", CUDA.replace("[0, 1]", "[7]"), accelerators={"cuda": "Other"})  # found first
    assert geartrain.accelerators.find_usable_cuda_devices() == [0, 1]


def test_class_that_two_distributions_have_is_refused(dists):
    for name in ("acme", "zeta"):
        dists.add(name, "class Gossip: ...", strategies={name: "Gossip", f"{name}_alias": "Gossip"})
    with pytest.raises(
        ImportError,
        match=r"several distributions have one: .*fake_acme:Gossip.*Fix: import it from its own",
    ):
        _ = geartrain.strategies.Gossip


@pytest.mark.parametrize("name", ["DPDStrategy", "single", "__path__"])
def test_unknown_name_is_no_attribute(dists, name):
    assert not hasattr(geartrain.strategies, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from geartrain.strategies import {name}")


def test_unknown_name_is_an_error_with_the_installed_names(dists):
    dists.strategy("gossip", cls="GossipStrategy")
    with pytest.raises(AttributeError, match="GossipStrategy, SingleDeviceStrategy"):
        _ = geartrain.strategies.DPDStrategy


@pytest.mark.parametrize("value", ["={module}", "=what is this?"])
def test_entry_point_that_names_no_class_spoils_no_other_name(dists, value):
    dists.add("acme-broken", "", strategies={"broken": value.format(module="fake_acme_broken")})
    assert geartrain.strategies.SingleDeviceStrategy is SingleDeviceStrategy
    assert not hasattr(geartrain.strategies, "DPDStrategy")
    assert "SingleDeviceStrategy" in dir(geartrain.strategies)
    with pytest.raises(ImportError, match=r"pip install geartrain-ddp$"):
        _ = geartrain.strategies.DDPStrategy
