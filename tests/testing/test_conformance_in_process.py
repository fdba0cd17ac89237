"""Conformance of the strategies ``single``, ``dp`` and ``ddp2``, which start no process."""

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(300)


class TestSingle(StrategyConformance):
    strategy = "single"
    devices = 1
    program = "one process"
    matrix = "error_in|multi_node"  # each needs another program


class TestDP(StrategyConformance):
    strategy = "dp"
    program = "one process"
    matrix = "error_in|one_device|multi_node|key_on|three"


@pytest.mark.matrix
class TestDDP2(StrategyConformance):
    strategy = "ddp2"
