"""The algorithms of the strategy ``bagua`` conform: equality for gradient_allreduce, the bounds that they declare for the others.

All algorithms of as many ranks share a program. Failures are gradient_allreduce's here; tests/bagua/test_faults.py has them for each
algorithm.

The bounds hold off what diverges or drifts, and bytegrad's a rank that steps from its own gradients. If each rank has weights of its own,
the bounds cannot tell whether anything is averaged, because ranks that train alone learn as well here. test_communication tells that
something is, and tests/bagua, which compares weights with references, that it is the right thing.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(600)

#: The default's cases: those whose results differ between algorithms.
OWN = r"equals_one_process\[(sgd|accumulation)\]|identical|communication|apart|buffers|no_sync"
#: Programs of their own, in which nothing is an algorithm's.
FAILING = r"error_in|signal|key_on_one_rank"
#: QAdam refuses clipping, more than one optimizer, and any other optimizer than its own. Its steps are as large however wide a layer is,
#: so that many_buckets, which has wide ones, diverges, on one rank as on several.
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
        "matrix": f"^(?!.*({OWN}))" if devices == 2 else "",
    }
    return type("Conforms", (StrategyConformance,), suite)


TestGradientAllReduce = conforms("gradient_allreduce")
TestGradientAllReduce.chosen = r"^(?!.*(error_in\[(?!training_step)|signal\[SIG(SEGV|TERM)))"
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
