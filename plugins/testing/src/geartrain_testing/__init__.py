"""What authors of plugins test with: ``pip install geartrain-testing``.

A plugin's test runs it in the test's own process, on two ranks that are threads::

    from geartrain.testing import run_plugin

    def test_logs_the_norm():
        first, second = run_plugin(GradientNorm(every=2))
        assert first.metrics["grad_norm"] > 0

A strategy's tests are a file of five lines, run by pytest (or no file at all: ``geartrain conformance NAME``)::

    from geartrain.testing import Capabilities, StrategyConformance

    class TestMine(StrategyConformance):
        strategy = "mine"
        devices = 2
        capabilities = Capabilities(multi_node=False)

There is no ``pytest11`` entry point: one would be loaded by every pytest on the machine, whatever it tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from geartrain_testing._version import __version__
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
    "__version__",
    "run_plugin",
]

#: What is imported when it is asked for -> its module: the programs that the kit starts import this package too, and must not pay for it.
_LAZY = {
    "RankResult": "plugins",
    "StrategyConformance": "conformance",
    "ThreadRanks": "thread_ranks",
    "run_plugin": "plugins",
}
#: The modules with the kit's asserts: pytest explains failed ones only where it was told to before they are imported.
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
