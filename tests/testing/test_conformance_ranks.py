"""Conformance of ``ddp``, ``fsdp`` and ``bagua``, which share programs for equally many ranks.

bagua's gradient_allreduce is exact, other algorithms have bounds. tests/bagua/test_faults.py has
the failures of each algorithm.

The bounds catch training that diverges or drifts. bytegrad's bound also catches a rank that steps
with its own gradients. If ranks have different weights, the bounds do not show averaging, because
ranks that train alone also learn here. test_communication shows that ranks communicate, and
tests/bagua compares their weights with references.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(600)

#: The cases whose results differ between algorithms. By default only the first runs, because
#: tests/bagua compares the weights of ranks with references.
OWN = r"equals_one_process\[sgd\]|communication|no_sync"
#: Cases that need more programs and do not depend on the algorithm.
FAILING = r"error_in|signal|key_on_one_rank"
#: QAdam refuses clipping, several optimizers, and other optimizers. Its step size does not depend
#: on a layer's width, so many_buckets with its wide layers diverges, also on one rank.
QADAM = {"class": "geartrain_bagua:QAdamOptimizer", "lr": 0.05, "warmup_steps": 4}
NOT_FOR_QADAM = r"\[(clipping|two_optimizers|scheduler|many_buckets)\]"


def conforms(
    algorithm: str, devices: int = 2, optimizer: Mapping[str, Any] | None = None, **options: Any
) -> type[StrategyConformance]:
    """Return the kit's tests of an algorithm."""
    unwanted = f"{FAILING}|{NOT_FOR_QADAM}" if optimizer else FAILING
    suite = {
        "strategy": "bagua",
        "options": {"algorithm": algorithm, **options},
        "optimizer": optimizer or {},
        "devices": devices,
    }
    suite |= {
        "program": f"{devices} ranks",
        # What may depend on the number of ranks; two ranks run the other cases.
        "chosen": rf"^(?!.*({unwanted}))" if devices == 2 else rf"{OWN}|identical|metadata|_left",
        "matrix": r"^(?!.*equals_one_process\[sgd\])|three" if devices == 2 else "",
    }
    return type("Conforms", (StrategyConformance,), suite)


class TestDDP(StrategyConformance):
    strategy = "ddp"
    program = "2 ranks"
    # Each needs another program. tests/ddp/test_faults.py has every phase and signal.
    matrix = r"error_in\[(?!training_step)|signal|one_device|multi_node|key_on|three|_unsupported"


class TestDDPWithOptions(StrategyConformance):
    strategy = "ddp"
    program = "2 ranks"
    options: ClassVar[dict[str, object]] = {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 0.0001,
    }
    chosen = "equals_one_process|identical|no_sync|unused"
    matrix = r"\[(?!many_buckets|unused)|identical|no_sync"


@pytest.mark.matrix
class TestDDPOnThree(StrategyConformance):
    strategy = "ddp"
    devices = 3
    # test_three_devices of ddp has the rest.
    chosen = r"sgd|training_coverage|barrier|samples|uneven|training_step"


#: Each layer of the kit's nets is a unit.
UNITS: Mapping[str, object] = {"unit_parameters": 4}


class TestFSDP(StrategyConformance):
    strategy = "fsdp"
    program = "2 ranks"
    options = UNITS
    # ddp has the same launcher and collectives; tests/sharded has failures and the other cases.
    chosen = r"^(?!.*(signal\[SIG(SEGV|TERM)|error_in\[(?!training_step)))"
    matrix = r"^(?!.*(equals_one_process\[(?!sgd|adam)|no_sync))"


class TestFSDPThatFindsUnusedParameters(StrategyConformance):
    strategy = "fsdp"
    program = "2 ranks"
    options: ClassVar[dict[str, object]] = {"find_unused_parameters": True}
    chosen = r"unused"


class TestDDPSharded(StrategyConformance):
    strategy = "ddp_sharded"
    program = "2 ranks"
    chosen = r"equals_one_process|identical|no_sync|unused|resume|steps|unfr|types"
    # tests/sharded/test_training.py has others.
    matrix = r"^(?!.*(\[clipping|\[accumulation|\[two_optimizers|unfr))"


@pytest.mark.matrix
class TestFSDPWithCopiesOnFour(StrategyConformance):
    strategy = "fsdp"
    devices = 4
    program = "4 ranks"
    options: ClassVar[dict[str, object]] = {**UNITS, "shard_size": 2}
    # Each program of four ranks takes long; two ranks have the other cases.
    chosen = r"\[(sgd|adam|accumulation|clipping|many_buckets)\]|no_sync|resume|unfr|types|weights"


class TestTensorParallel(StrategyConformance):
    """Its ranks have one model, so cases do not fit in which each rank has its own loss or data."""

    strategy = "tensor_parallel"
    program = "2 ranks"
    options: ClassVar[dict[str, object]] = {"colwise": ["first", "second"], "rowwise": "last"}
    chosen = r"equals_one_process|identical|resume|start|buffers|sharded_|samples|uneven|fit_v|left"
    matrix = r"^(?!.*(\[sgd|\[weighted|resume))"


TestGradientAllReduce = conforms("gradient_allreduce")
TestGradientAllReduce.chosen = "^(?!.*(error_in|signal))"
TestGradientAllReduce.matrix = f"^(?!.*({OWN}|accumulation))|three"
TestByteGrad = conforms("bytegrad", hierarchical=False)
TestQAdam = conforms("qadam", optimizer=QADAM, hierarchical=False)
TestDecentralized = conforms("decentralized", hierarchical=False)
TestLowPrecisionDecentralized = conforms("low_precision_decentralized", hierarchical=False)
TestAsync = conforms("async", sync_interval_ms=1)
TestHalf = conforms("half")
TestPowerSGD = conforms("power_sgd")
TestByteGradHierarchical = pytest.mark.matrix(conforms("bytegrad"))

TestGradientAllReduceOnFour = conforms("gradient_allreduce", 4)
TestGradientAllReduceHierarchicalOnFour = conforms("gradient_allreduce", 4, hierarchical=True)
TestByteGradOnFour = conforms("bytegrad", 4, hierarchical=False)
TestQAdamOnFour = conforms("qadam", 4, QADAM, hierarchical=False)
TestDecentralizedOnFour = conforms("decentralized", 4, hierarchical=False)
TestShiftOneOnFour = conforms(
    "decentralized", 4, hierarchical=False, peer_selection_mode="shift_one"
)
TestLowPrecisionDecentralizedOnFour = conforms("low_precision_decentralized", 4, hierarchical=False)
TestAsyncOnFour = conforms("async", 4, sync_interval_ms=1)
TestHalfOnFour = conforms("half", 4)
TestPowerSGDOnFour = conforms("power_sgd", 4)
