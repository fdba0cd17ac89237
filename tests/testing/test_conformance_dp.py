"""Conformance of the strategies ``dp`` and ``ddp2``."""

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(300)


class TestDP(StrategyConformance):
    strategy = "dp"
    matrix = "error_in|one_device|multi_node|key_on"  # each needs more programs


@pytest.mark.matrix
class TestDDP2(StrategyConformance):
    strategy = "ddp2"
