"""Lists of distributions are those of the folders."""

import runpy
from pathlib import Path

from geartrain.errors.known import DISTRIBUTIONS, KNOWN

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "distributions.py"))


def test_the_lists_of_distributions_are_those_of_the_folders():
    assert [name for name, _ in TOOL["changed"]()] == [], "Fix: tests/tools/distributions.py"


def test_errors_know_the_names_of_every_distribution_of_ours():
    plugins = TOOL["PLUGINS"]
    assert {"geartrain", *(plugin.name for plugin in plugins)} == DISTRIBUTIONS
    assert {
        (kind, name): plugin.name
        for plugin in plugins
        for kind, names in plugin.names.items()
        for name in names
    } == KNOWN
