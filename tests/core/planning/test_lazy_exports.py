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


@pytest.mark.parametrize(
    "module",
    [
        "geartrain",
        "geartrain.planning.registry",
        "geartrain.planning.devices",
        "geartrain.hookspecs",
        "geartrain.strategies",
        "geartrain.accelerators",
    ],
)
def test_import_brings_no_torch(module):
    assert run(f"import sys, {module}; print('torch' in sys.modules)") == "False"


def test_import_replaces_no_exception_hook():
    code = "import sys; hook = sys.excepthook; import geartrain; print(sys.excepthook is hook)"
    assert run(code) == "True"


def test_listing_installed_plugins_imports_no_torch_and_no_plugin():
    code = (
        "import sys, geartrain.planning.registry as r; "
        "[c.as_dict() for c in r.Registry().candidates]; print(*sys.modules)"
    )
    loaded = run(code).split()
    assert "geartrain.planning.registry" in loaded
    assert not [
        name
        for name in loaded
        if name == "torch" or name.startswith(("geartrain_", "geartrain.builtin"))
    ]


def test_hookimpl_and_version_cost_no_torch():
    assert (
        run(
            "import sys, geartrain as g; g.hookimpl, g.__version__, dir(g); "
            "print('torch' in sys.modules)"
        )
        == "False"
    )


@pytest.mark.parametrize("name", geartrain.__all__)
def test_every_public_name_resolves(name):
    assert getattr(geartrain, name) is not None
    assert name in dir(geartrain)


def test_every_public_name_resolves_in_a_fresh_interpreter():
    assert (
        run("from geartrain import *; print(Module.__module__, Trainer.__name__)")
        == "geartrain.module.module Trainer"
    )


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


@pytest.mark.parametrize(
    ("module", "name", "distribution"),
    [
        ("strategies", "DDPStrategy", "geartrain-ddp"),
        ("strategies", "DDPSpawnStrategy", "geartrain-spawn"),
        ("strategies", "DataParallelStrategy", "geartrain-dp"),
        ("strategies", "DDP2Strategy", "geartrain-dp"),
        ("strategies", "HorovodStrategy", "geartrain-horovod"),
        ("strategies", "BaguaStrategy", "geartrain-bagua"),
        ("strategies", "QAdamOptimizer", "geartrain-bagua"),
        ("accelerators", "CUDAAccelerator", "geartrain-cuda"),
        ("accelerators", "MPSAccelerator", "geartrain-mps"),
        ("accelerators", "find_usable_cuda_devices", "geartrain-cuda"),
    ],
)
def test_known_name_that_is_not_installed_answers_with_the_install_line(
    dists, module, name, distribution
):
    with pytest.raises(ImportError, match=rf"{name}.*pip install {distribution}$"):
        exec(f"from geartrain.{module} import {name}")


def test_installed_class_is_found_and_no_other_imported(dists):
    ddp = dists.strategy("ddp", cls="DDPStrategy")
    broken = dists.add("acme-broken", "1 / 0", strategies={"broken": "Broken"})
    from geartrain.strategies import DDPStrategy

    assert DDPStrategy is sys.modules[ddp].DDPStrategy
    assert broken not in sys.modules
    assert dir(geartrain.strategies) == ["Broken", "DDPStrategy", "SingleDeviceStrategy"]


@pytest.mark.parametrize("others", [("acme",), ("acme", "zeta")])
def test_class_of_our_distribution_wins_over_others_of_its_name(dists, others):
    modules = [
        dists.add(name, "class DDPStrategy: ...", strategies={f"{name}_ddp": "DDPStrategy"})
        for name in others
    ]
    ours = dists.strategy("ddp", cls="DDPStrategy")
    with pytest.warns(
        UserWarning,
        match=r"geartrain\.strategies\.DDPStrategy is geartrain-ddp's\..*acme \(fake_acme:DDPStrat",
    ):
        found = geartrain.strategies.DDPStrategy
    assert found is sys.modules[ours].DDPStrategy
    assert not set(modules) & set(sys.modules)


def test_class_of_core_wins_over_others_of_its_name(dists):
    dists.add("acme", "class CPUAccelerator: ...", accelerators={"acme": "CPUAccelerator"})
    with pytest.warns(UserWarning, match=r"CPUAccelerator is geartrain's"):
        assert geartrain.accelerators.CPUAccelerator is CPUAccelerator


def test_class_of_our_name_alone_is_not_taken_for_ours(dists):
    module = dists.add("acme", "class DDPStrategy: ...", strategies={"acme": "DDPStrategy"})
    with pytest.raises(
        ImportError,
        match=r"one: acme \(fake_acme:DDPStrategy\). Fix: pip install geartrain-ddp$",
    ):
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


def test_strategy_that_geartrain_does_not_know_is_found(dists):
    module = dists.strategy("gossip", cls="GossipStrategy")
    assert (
        importlib.import_module("geartrain.strategies").GossipStrategy
        is sys.modules[module].GossipStrategy
    )


def test_helper_beside_an_installed_plugin_is_found(dists):
    dists.add("geartrain-cuda", CUDA, accelerators={"cuda": "CUDAAccelerator"})
    from geartrain.accelerators import find_usable_cuda_devices

    assert find_usable_cuda_devices() == [0, 1]


@pytest.mark.parametrize("module", [geartrain.strategies, geartrain.accelerators])
@pytest.mark.parametrize("name", ["DPDStrategy", "single", "__path__", "__wrapped__"])
def test_unknown_name_is_no_attribute(dists, module, name):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=name):
        getattr(module, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from {module.__name__} import {name}")


def test_unknown_name_is_an_error_with_the_installed_names(dists):
    dists.strategy("gossip", cls="GossipStrategy")
    with pytest.raises(AttributeError, match="GossipStrategy, SingleDeviceStrategy"):
        _ = geartrain.strategies.DPDStrategy


def test_hasattr_of_installed_names(dists):
    assert hasattr(geartrain.strategies, "SingleDeviceStrategy")
    assert hasattr(geartrain.accelerators, "CPUAccelerator")


@pytest.mark.parametrize("value", ["={module}", "=what is this?"])
def test_entry_point_that_names_no_class_spoils_no_other_name(dists, value):
    dists.add("acme-broken", "", strategies={"broken": value.format(module="fake_acme_broken")})
    assert geartrain.strategies.SingleDeviceStrategy is SingleDeviceStrategy
    assert not hasattr(geartrain.strategies, "DPDStrategy")
    assert "SingleDeviceStrategy" in dir(geartrain.strategies)
    with pytest.raises(ImportError, match=r"pip install geartrain-ddp$"):
        _ = geartrain.strategies.DDPStrategy
