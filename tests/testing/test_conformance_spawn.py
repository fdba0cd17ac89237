"""Conformance of the strategy ``ddp_spawn``; some cases run with every start method."""

from typing import ClassVar

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(300)

#: The cases that depend on the start method: start, results, end and leftovers of processes. With
#: "spawn", each rank of each fit takes seconds to import torch.
STARTED = (
    r"\[(sgd|fit_twice)\]|evaluation_coverage|fit_validate_test|caller|plugins|metadata|_left"
    r"|one_device|multi_node|loopback_only"
    r"|error_in\[(setup|training_step)\]|signal\[SIG(KILL|STOP)\]"
)


class TestForkserver(StrategyConformance):
    strategy = "ddp_spawn"
    # tests/spawn/test_failures.py tests by default that no process is left.
    matrix = r"^(?!test_(equals_one_process\[sgd\]|caller|metadata))"


@pytest.mark.matrix
@pytest.mark.timeout(600)
class TestSpawn(StrategyConformance):
    strategy = "spawn"
    deadline = 200.0  # each process of each fit imports torch
    options: ClassVar[dict[str, object]] = {"start_method": "spawn"}
    chosen = STARTED


@pytest.mark.matrix
class TestFork(StrategyConformance):
    strategy = "ddp_spawn"
    options: ClassVar[dict[str, object]] = {"start_method": "fork"}
    chosen = STARTED
