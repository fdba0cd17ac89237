"""Conformance of the strategy ``bagua``: gradient_allreduce is exact, other algorithms have bounds.

All algorithms on equally many ranks share a program. Only gradient_allreduce has cases of failures
here; tests/bagua/test_faults.py has them for each algorithm.

The bounds catch training that diverges or drifts. bytegrad's bound also catches a rank that steps
with its own gradients. If ranks have different weights, the bounds do not show averaging, because
ranks that train alone also learn here. test_communication shows that ranks communicate, and
tests/bagua compares their weights with references.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(600)

#: The cases of a default run: their results differ between algorithms.
OWN = r"equals_one_process\[(sgd|accumulation)\]|identical|communication|apart|buffers|no_sync"
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
        "program": f"bagua-{devices}",
        "chosen": rf"^(?!.*({unwanted}))",
        "matrix": f"^(?!.*({OWN}))|three" if devices == 2 else "",
    }
    return type("Conforms", (StrategyConformance,), suite)


TestGradientAllReduce = conforms("gradient_allreduce")
TestGradientAllReduce.chosen = r"^(?!.*(error_in\[(?!training_step)|signal\[SIG(SEGV|TERM)))"
TestGradientAllReduce.matrix = f"^(?!.*({OWN}|equals_one_process))|three"
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
