"""Test kit for authors of plugins: ``pip install geartrain-testing``.

A plugin's test runs the plugin in the test's process, on two ranks that are threads::

    from geartrain.testing import run_plugin

    def test_logs_the_norm():
        first, second = run_plugin(GradientNorm(every=2))
        assert first.metrics["grad_norm"] > 0

A strategy's tests are a file of five lines that pytest runs::

    from geartrain.testing import Capabilities, StrategyConformance

    class TestMine(StrategyConformance):
        strategy = "mine"
        devices = 2
        capabilities = Capabilities(multi_node=False)

``geartrain conformance NAME`` runs the same tests without a file. The package has no ``pytest11``
entry point, because every pytest of the environment would load it, whatever it tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from geartrain_testing._version import __version__ as __version__
from geartrain_testing.capabilities import Capabilities

if TYPE_CHECKING:
    from geartrain_testing.conformance import StrategyConformance
    from geartrain_testing.plugins import RankResult, run_plugin
    from geartrain_testing.thread_ranks import ThreadRanks

__all__ = [
    "Capabilities",
    "RankResult",
    "StrategyConformance",
    "ThreadRanks",
    "run_plugin",
]

#: Name -> module, imported on first use: the programs that the kit starts import this package too,
#: and need none of these.
_LAZY = {
    "RankResult": "plugins",
    "StrategyConformance": "conformance",
    "ThreadRanks": "thread_ranks",
    "run_plugin": "plugins",
}
#: The modules with the kit's asserts: pytest explains a failed assert only if its module was
#: registered before the import.
_ASSERTING = (
    "cases",
    "cases_failures",
    "cases_launch",
    "cases_training",
    "checks",
    "kit",
    "launching",
)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'geartrain_testing' has no attribute {name!r}")
    if name == "StrategyConformance":
        import pytest

        pytest.register_assert_rewrite(*(f"geartrain_testing.{module}" for module in _ASSERTING))
    value = getattr(import_module(f"geartrain_testing.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
