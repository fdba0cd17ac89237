"""Conformance of the strategy ``ddp_spawn``; some cases run with every start method."""

from typing import ClassVar

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(300)

#: The cases that depend on the start method: start, results, end and leftovers of processes. With
#: "spawn", each rank of each fit takes seconds to import torch.
STARTED = (
    r"\[fit_twice\]|fit_validate_test|caller|plugins|metadata|_left|loopback_only"
    r"|error_in\[(setup|training_step)\]|signal\[SIGKILL\]"
)


class TestForkserver(StrategyConformance):
    strategy = "ddp_spawn"
    chosen = "^(?!.*three)"  # its ranks have the collectives of ddp
    # tests/spawn tests by default the results, and that no process is left.
    matrix = "^(?!test_metadata)"


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
