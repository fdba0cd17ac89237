"""The strategy ``ddp`` conforms, as it is and with its options."""

from typing import ClassVar

from geartrain.testing import StrategyConformance


class TestDDP(StrategyConformance):
    strategy = "ddp"


class TestDDPWithOptions(StrategyConformance):
    strategy = "ddp"
    options: ClassVar[dict[str, object]] = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}
    chosen = "equals_one_process|identical|no_sync|unused"


class TestDDPOnThree(StrategyConformance):
    strategy = "ddp"
    devices = 3
    chosen = r"sgd|coverage|metrics|means|gather|broadcast|barrier|samples|uneven|training_step"
