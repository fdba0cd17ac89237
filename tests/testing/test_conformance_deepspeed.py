"""Conformance of the strategy ``deepspeed``, on 2 ranks."""

import pytest

from geartrain.testing import StrategyConformance

pytest.importorskip("geartrain_deepspeed", reason="geartrain-deepspeed is not installed")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: it has an own environment")

#: The first test's time includes a program that runs all scenarios of its class.
pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(900)]


class TestDeepSpeed(StrategyConformance):
    strategy = "deepspeed"
    # tests/ddp has every phase and signal, with the same supervisor
    chosen = r"^(?!.*(error_in\[(?!training_step)|SIGSEGV|SIGTERM))"
    deadline = 180.0
    timeout = 60.0  # on a busy machine one rank may finish its imports long after another
