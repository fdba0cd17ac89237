"""What authors of plugins test with: ``pip install geartrain[testing]``.

A strategy's tests are a file of five lines, run by pytest (or no file at all: ``geartrain conformance NAME``)::

    from geartrain.testing import Capabilities, StrategyConformance

    class TestMine(StrategyConformance):
        strategy = "mine"
        devices = 2
        capabilities = Capabilities(multi_node=False)

There is no ``pytest11`` entry point: one would be loaded by every pytest on the machine, whatever it tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from geartrain.testing.capabilities import Capabilities

if TYPE_CHECKING:
    from geartrain.testing.conformance import StrategyConformance

__all__ = ["Capabilities", "StrategyConformance"]

#: The modules with the kit's asserts: pytest explains failed ones only where it was told to before they are imported.
_ASSERTING = ("cases", "cases_failures", "cases_launch", "cases_training", "checks", "kit", "launching")


def __getattr__(name: str) -> Any:
    # When asked for: the programs that the kit starts import this package too, and must not pay for pytest.
    if name != "StrategyConformance":
        raise AttributeError(f"module 'geartrain.testing' has no attribute {name!r}")
    import pytest

    pytest.register_assert_rewrite(*(f"geartrain.testing.{module}" for module in _ASSERTING))
    from geartrain.testing.conformance import StrategyConformance

    globals()[name] = StrategyConformance
    return StrategyConformance
