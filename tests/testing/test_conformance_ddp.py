"""Conformance of the strategy ``ddp``, with default options and with others."""

from typing import ClassVar

import pytest

from geartrain.testing import StrategyConformance

#: The first test's time includes a program that runs all scenarios of the first two classes.
pytestmark = pytest.mark.timeout(300)


class TestDDP(StrategyConformance):
    strategy = "ddp"
    program = "ddp"
    # Each needs another program. tests/ddp/test_faults.py has every phase and signal.
    matrix = r"error_in\[(?!training_step)|signal\[(?!SIGKILL)|one_device|multi_node|key_on"


class TestDDPWithOptions(StrategyConformance):
    strategy = "ddp"
    program = "ddp"
    options: ClassVar[dict[str, object]] = {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 0.0001,
    }
    chosen = "equals_one_process|identical|no_sync|unused"


@pytest.mark.matrix
class TestDDPOnThree(StrategyConformance):
    strategy = "ddp"
    devices = 3
    chosen = r"sgd|coverage|metrics|means|gather|broadcast|barrier|samples|uneven|training_step"
