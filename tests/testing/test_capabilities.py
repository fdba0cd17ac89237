"""Capabilities: sources, wrong declarations; and imports of the kit."""

import subprocess
import sys

import pytest

from geartrain import UsageError
from geartrain_testing.capabilities import SWITCHES, Capabilities


def test_capabilities_of_a_mapping_an_object_and_none():
    assert Capabilities.of({"no_sync": False}, "x") == Capabilities(no_sync=False)
    assert Capabilities.of(Capabilities(multi_node=False), "x") == Capabilities(multi_node=False)
    assert Capabilities.of(None, "x") == Capabilities()


def test_an_unknown_capability_is_an_error_with_the_plugin_and_the_nearest_name():
    with pytest.raises(
        UsageError, match=r"mine\[mine\]: there is no capability 'nosync'\. Did you mean 'no_sync'"
    ):
        Capabilities.of({"nosync": False}, "mine[mine]")


@pytest.mark.parametrize("bound", [0, -0.5, 0.51, float("inf"), float("nan")])
def test_convergence_is_bounded(bound):
    with pytest.raises(UsageError, match=r"convergence=.* above 0 and at most 0\.5"):
        Capabilities(convergence=bound)


def test_switches_are_those_that_are_on_or_off():
    assert set(SWITCHES) == {
        *("no_sync", "unused_parameters", "uneven_inputs", "sharded_loader"),
        *("multi_node", "identical_weights", "loopback_only", "weighted_loss", "recovers"),
        "float64",
    }


def test_neither_geartrain_nor_the_programs_import_pytest():
    code = (
        "import sys, geartrain, geartrain_testing.program, geartrain_testing.scenarios; "
        "sys.exit('pytest' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_no_pytest_plugin_is_installed():
    from importlib_metadata import distribution

    assert not [
        entry for entry in distribution("geartrain").entry_points if entry.group == "pytest11"
    ]
