"""The figures of Bagua's own tests, and cases where each rank has its own data, on two ranks."""

import pytest
import torch
from several_ranks import kept_by

from .upstream_cases import CASES, order, seeded, train, train_cases

#: Weight norms after an epoch, from Bagua's tests. Both ranks have the same data, so the norms
#: check the quantiser and the timing, not the averaging.
NORMS = {
    "gradient_allreduce": 2.835376262664795,
    "bytegrad": 2.835047960281372,
    "decentralized": 2.835376262664795,
    "low_precision_decentralized": 2.8350701332092285,
    "qadam": 6.891299724578857,
}
#: Norms of each rank if it has its own shard of the data, from the algorithms of Bagua's papers and
#: code, written by hand in one process.
NORMS_OF_SHARDS = {
    "gradient_allreduce of shards": (2.69305, 2.69305),
    "bytegrad of shards": (2.69275, 2.69275),
    "qadam of shards": (5.12995, 5.12995),
    "qadam of shards, hierarchical": (5.12679, 5.12679),
    "decentralized of shards": (2.68556, 2.71752),
    "low_precision_decentralized of shards": (2.68723, 2.72053),
}
IN_BYTES = ("bytegrad", "qadam", "low_precision_decentralized")
#: Algorithms with different weights on each rank.
APART = ("decentralized", "low_precision_decentralized")


#: Case -> weights, for each rank.
ranks = kept_by(train_cases)


def norm(weights):
    return float(weights["weight"].norm())


def test_the_net_is_baguas():
    assert norm(seeded()[0].state_dict()) == pytest.approx(3.1995556354522705, abs=1e-6 + 1e-6)


def test_one_device_without_a_strategy_has_baguas_norm():
    _, weights = train("single", 1, order(), sharded=False)
    assert norm(weights) == pytest.approx(2.4819390773773193, abs=1e-6)


@pytest.mark.parametrize("case", NORMS)
def test_the_norm_is_baguas(ranks, case):
    for weights in ranks:
        assert norm(weights[case]) == pytest.approx(NORMS[case], abs=1e-6)


@pytest.mark.parametrize("case", ["async", "async of shards"])
def test_async_trains(ranks, case):
    """The norm is 3.2 before training, 2.84 with rank 0's data alone, 2.69 with both shards."""
    for weights in ranks:
        assert norm(weights[case]) < 2.9


@pytest.mark.parametrize("case", NORMS_OF_SHARDS)
def test_norm_of_shards(ranks, case):
    # A gradient that differs in its last digit may round to another byte, one of 255 steps.
    tolerance = 2e-4 if CASES[case][0] in IN_BYTES else 1e-5
    for weights, expected in zip(ranks, NORMS_OF_SHARDS[case], strict=True):
        assert norm(weights[case]) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    "case", [name for name, (algorithm, _, _) in CASES.items() if algorithm not in APART]
)
def test_weights_are_the_same_on_both_ranks_bit_by_bit(ranks, case):
    for name, tensor in ranks[0][case].items():
        assert torch.equal(tensor, ranks[1][case][name])
