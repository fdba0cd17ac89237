"""The algorithms of the strategy ``bagua`` conform: equality for gradient_allreduce, the bounds that they declare for the others.

All cases on 2 and on 4 ranks take half an hour: they are marked ``long``, and ``tox -e long`` runs them. What is not marked is a
choice that takes minutes: everything for gradient_allreduce, what is an algorithm's own for the others.

The bounds hold off what diverges or drifts, and bytegrad's a rank that steps from its own gradients; where each rank has weights of its
own they cannot tell whether anything is averaged: ranks that train alone learn as well here. That is for tests/bagua, which compares
weights with references.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from geartrain.testing import StrategyConformance

#: What differs between algorithms: what ranks come to, and how a run ends. Ranks that fail are in tests/bagua/test_faults.py.
OWN = r"equals_one_process\[(sgd|many_buckets|accumulation|fit_twice)\]|identical|apart|buffers|no_sync|fit_validate|left"
#: QAdam refuses clipping, more than one optimizer, and any other optimizer than its own. Its steps are as large however wide a layer is,
#: so that many_buckets, which has wide ones, diverges, on one rank as on several.
NOT_FOR_QADAM = r"^(?!.*\[(clipping|two_optimizers|scheduler|many_buckets)\])"
QADAM = {"class": "geartrain_bagua:QAdamOptimizer", "lr": 0.05, "warmup_steps": 4}


def conforms(
    algorithm: str, chosen: str = "", devices: int = 2, optimizer: Mapping[str, Any] | None = None, **options: Any
) -> type[StrategyConformance]:
    """The kit's tests of an algorithm, of which ``chosen`` are wanted."""
    wanted = {"strategy": "bagua", "options": {"algorithm": algorithm, **options}, "optimizer": optimizer or {}}
    return type("Conforms", (StrategyConformance,), {**wanted, "chosen": chosen, "devices": devices})


TestGradientAllReduce = conforms("gradient_allreduce")
TestByteGrad = conforms("bytegrad", OWN, hierarchical=False)
TestQAdam = conforms("qadam", f"{NOT_FOR_QADAM}.*({OWN})", optimizer=QADAM, hierarchical=False)
TestDecentralized = conforms("decentralized", OWN, hierarchical=False)
TestLowPrecisionDecentralized = conforms("low_precision_decentralized", OWN, hierarchical=False)
TestAsync = conforms("async", OWN, sync_interval_ms=1)
TestHalf = conforms("half", OWN)
TestPowerSGD = conforms("power_sgd", OWN)

# --- all cases -----------------------------------------------------------------------------------------------------------

long = pytest.mark.long
TestByteGradWhole = long(conforms("bytegrad", hierarchical=False))
TestByteGradHierarchical = long(conforms("bytegrad"))
TestQAdamWhole = long(conforms("qadam", NOT_FOR_QADAM, optimizer=QADAM, hierarchical=False))
TestDecentralizedWhole = long(conforms("decentralized", hierarchical=False))
TestLowPrecisionDecentralizedWhole = long(conforms("low_precision_decentralized", hierarchical=False))
TestAsyncWhole = long(conforms("async", sync_interval_ms=1))
TestHalfWhole = long(conforms("half"))
TestPowerSGDWhole = long(conforms("power_sgd"))

TestGradientAllReduceOnFour = long(conforms("gradient_allreduce", devices=4))
TestGradientAllReduceHierarchicalOnFour = long(conforms("gradient_allreduce", devices=4, hierarchical=True))
TestByteGradOnFour = long(conforms("bytegrad", devices=4, hierarchical=False))
TestQAdamOnFour = long(conforms("qadam", NOT_FOR_QADAM, 4, QADAM, hierarchical=False))
TestDecentralizedOnFour = long(conforms("decentralized", devices=4, hierarchical=False))
TestShiftOneOnFour = long(conforms("decentralized", devices=4, hierarchical=False, peer_selection_mode="shift_one"))
TestLowPrecisionDecentralizedOnFour = long(conforms("low_precision_decentralized", devices=4, hierarchical=False))
TestAsyncOnFour = long(conforms("async", devices=4, sync_interval_ms=1))
TestHalfOnFour = long(conforms("half", devices=4))
TestPowerSGDOnFour = long(conforms("power_sgd", devices=4))
