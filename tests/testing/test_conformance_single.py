"""Conformance of the strategy ``single``."""

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(300)


class TestSingle(StrategyConformance):
    strategy = "single"
    devices = 1
    matrix = r"error_in\[(?!training_step)"
