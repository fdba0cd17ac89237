"""Run geartrain's conformance kit, which every strategy must pass."""

from geartrain.testing import StrategyConformance


class TestMine(StrategyConformance):
    strategy = "mine"
