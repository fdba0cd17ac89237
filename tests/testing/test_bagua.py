"""The algorithms of the strategy ``bagua`` conform: equality for gradient_allreduce, the bounds that they declare for the others.

All cases on 2 and on 4 ranks take half an hour: they are marked ``long``, and ``tox -e long`` runs them. What is not marked is a
choice that takes minutes: everything for gradient_allreduce, what is an algorithm's own for the others.

The bounds hold off what diverges or drifts, and bytegrad's a rank that steps from its own gradients; where each rank has weights of its
own they cannot tell whether anything is averaged: ranks that train alone learn as well here. That is for tests/bagua, which compares
weights with references.
"""

from typing import Any, ClassVar

import pytest

from geartrain.testing import StrategyConformance

#: What differs between algorithms: what ranks come to, and how a run ends. Ranks that fail are in tests/bagua/test_faults.py.
OWN = r"equals_one_process\[(sgd|many_buckets|accumulation|fit_twice)\]|identical|apart|buffers|no_sync|fit_validate|left"
#: QAdam refuses clipping, more than one optimizer, and any other optimizer than its own. Its steps are as large however wide a layer is,
#: so that many_buckets, which has wide ones, diverges, on one rank as on several.
NOT_FOR_QADAM = r"^(?!.*\[(clipping|two_optimizers|scheduler|many_buckets)\])"
QADAM = {"class": "geartrain_bagua:QAdamOptimizer", "lr": 0.05, "warmup_steps": 4}


class Bagua(StrategyConformance):
    """Collected through its subclasses alone: pytest takes classes that begin with Test."""

    strategy = "bagua"


class TestGradientAllReduce(Bagua):
    options: ClassVar[dict[str, Any]] = {"algorithm": "gradient_allreduce"}


class TestByteGrad(Bagua):
    options: ClassVar[dict[str, Any]] = {"algorithm": "bytegrad", "hierarchical": False}
    chosen = OWN


class TestQAdam(Bagua):
    options: ClassVar[dict[str, Any]] = {"algorithm": "qadam", "hierarchical": False}
    optimizer: ClassVar[dict[str, Any]] = QADAM
    chosen = f"{NOT_FOR_QADAM}.*({OWN})"


class TestDecentralized(Bagua):
    options: ClassVar[dict[str, Any]] = {"algorithm": "decentralized", "hierarchical": False}
    chosen = OWN


class TestLowPrecisionDecentralized(Bagua):
    options: ClassVar[dict[str, Any]] = {"algorithm": "low_precision_decentralized", "hierarchical": False}
    chosen = OWN


class TestAsync(Bagua):
    options: ClassVar[dict[str, Any]] = {"algorithm": "async", "sync_interval_ms": 1}
    chosen = OWN


# --- all cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
class TestByteGradWhole(TestByteGrad):
    chosen = ""


@pytest.mark.long
class TestByteGradHierarchical(TestByteGrad):
    options: ClassVar[dict[str, Any]] = {"algorithm": "bytegrad"}
    chosen = ""


@pytest.mark.long
class TestQAdamWhole(TestQAdam):
    chosen = NOT_FOR_QADAM


@pytest.mark.long
class TestDecentralizedWhole(TestDecentralized):
    chosen = ""


@pytest.mark.long
class TestLowPrecisionDecentralizedWhole(TestLowPrecisionDecentralized):
    chosen = ""


@pytest.mark.long
class TestAsyncWhole(TestAsync):
    chosen = ""


@pytest.mark.long
class TestGradientAllReduceOnFour(TestGradientAllReduce):
    devices = 4


@pytest.mark.long
class TestGradientAllReduceHierarchicalOnFour(TestGradientAllReduce):
    options: ClassVar[dict[str, Any]] = {"algorithm": "gradient_allreduce", "hierarchical": True}
    devices = 4


@pytest.mark.long
class TestByteGradOnFour(TestByteGradWhole):
    devices = 4


@pytest.mark.long
class TestQAdamOnFour(TestQAdamWhole):
    devices = 4


@pytest.mark.long
class TestDecentralizedOnFour(TestDecentralizedWhole):
    devices = 4


@pytest.mark.long
class TestShiftOneOnFour(TestDecentralizedWhole):
    options: ClassVar[dict[str, Any]] = {"algorithm": "decentralized", "hierarchical": False, "peer_selection_mode": "shift_one"}
    devices = 4


@pytest.mark.long
class TestLowPrecisionDecentralizedOnFour(TestLowPrecisionDecentralizedWhole):
    devices = 4


@pytest.mark.long
class TestAsyncOnFour(TestAsyncWhole):
    devices = 4
