"""The algorithm decentralized: weights are averaged during forward and backward."""

from types import SimpleNamespace

import pytest
import torch
from regression import Net, one_trainer, samples, weights
from torch.utils.data import DataLoader

from geartrain import UsageError
from geartrain_bagua import BaguaStrategy
from geartrain_bagua.algorithms.decentralized import Decentralized

from . import reference_weights as reference
from .weights_ranks import DEADLINE, assert_starts_from_rank_0, found

#: The first test runs the program of all three files.
pytestmark = pytest.mark.timeout(DEADLINE + 60)

STEPS = 6
#: With four ranks, gloo adds the weights in another order than the reference.
ORDER = {"rtol": 1e-6, "atol": 1e-7}


def same(name, expected, exact=True, ranks=4):
    """Compare every rank's weights after every step; a case of two ranks ran twice."""
    for rank in range(4):
        ours = found()[rank][name]["history"]
        assert len(ours) == len(expected)
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(
                mine, theirs[rank % ranks], **({"rtol": 0, "atol": 0} if exact else ORDER)
            )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("mode", "interval"), [("all", 1), ("all", 3), ("shift_one", 1), ("shift_one", 2)]
)
def test_trains_as_the_reference(mode, interval, ranks):
    expected = reference.decentralized(ranks, STEPS, mode, interval)
    exact = ranks == 2 or mode == "shift_one"
    same(f"{mode} {interval} {ranks}", expected, exact=exact, ranks=ranks)
    assert not torch.equal(expected[-1][0], expected[-1][1])


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_average_inside_each_node_first(mode):
    same(f"{mode} nodes", reference.decentralized(4, STEPS, mode, node=2))


def test_one_node_is_the_average_over_all():
    same("all one node", reference.decentralized(4, STEPS), exact=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("momentum", {"kind": "momentum"}),
        ("two optimizers", {"kind": "two"}),
        ("accumulation and clipping", {"micros": 3, "clip": 0.01}),
        ("many buckets", {}),
    ],
)
def test_every_kind_of_step_exchanges_once(name, options):
    same(name, reference.decentralized(2, STEPS, **options), ranks=2)


def test_the_case_of_many_buckets_has_four():
    assert len(found()[0]["many buckets"]["buckets"]) == 4


def test_forward_and_backward_see_the_weights_from_before():
    assert all(
        rank[name]["seen"] == [True] * STEPS
        for rank in found()
        for name in ("all 1 4", "shift_one 1 4")
    )


def test_partners_are_mutual_and_every_partner_has_its_turn():
    from geartrain_bagua.algorithms.decentralized import partner

    for size in (2, 4, 6, 8):
        for exchange in range(3 * size):
            those = [
                partner(SimpleNamespace(rank=rank, size=size), exchange) for rank in range(size)
            ]
            assert those == [reference.peer(rank, size, exchange) for rank in range(size)]
            assert all(those[those[rank]] == rank != those[rank] for rank in range(size))
        assert {
            partner(SimpleNamespace(rank=0, size=size), exchange) for exchange in range(size)
        } == set(range(size // 2, size))


def test_a_run_resumed_on_other_ranks_starts_from_rank_0s_weights():
    assert_starts_from_rank_0("decentralized", 3)


# --- errors ---------------------------------------------------------------------------------------


def plan(processes, nodes=1):
    return SimpleNamespace(
        processes=processes,
        num_nodes=nodes,
        strategy=SimpleNamespace(label="geartrain-bagua[bagua]"),
    )


@pytest.mark.parametrize(
    ("hierarchical", "processes", "nodes", "named"),
    [(False, 3, 1, "3 processes"), (True, 4, 1, "1 node"), (True, 6, 3, "3 nodes")],
)
def test_an_odd_number_of_partners_is_refused_before_the_start(
    hierarchical, processes, nodes, named
):
    with pytest.raises(UsageError, match=named) as error:
        Decentralized(hierarchical, "shift_one").check_plan(plan(processes, nodes), object)
    assert "geartrain-bagua[bagua]" in str(error.value)
    assert "Fix:" in str(error.value)


@pytest.mark.parametrize("hierarchical", [True, False])
def test_one_process_has_no_partner_and_trains_as_without_the_strategy(hierarchical):
    trained = []
    for strategy in (BaguaStrategy(algorithm=Decentralized(hierarchical, "shift_one")), "single"):
        module = Net()
        one_trainer(strategy=strategy, devices=1).fit(module, DataLoader(samples(), batch_size=8))
        trained.append(weights(module))
    for name, value in trained[1].items():
        assert torch.equal(trained[0][name], value), name


@pytest.mark.parametrize(
    ("hierarchical", "mode", "processes", "nodes"),
    [
        (False, "shift_one", 4, 1),
        (True, "shift_one", 6, 2),
        (True, "all", 3, 3),
        (False, "shift_one", None, 1),
    ],
)
def test_an_even_number_of_partners_is_allowed(hierarchical, mode, processes, nodes):
    Decentralized(hierarchical, mode).check_plan(plan(processes, nodes), object)


def test_ranks_refuse_one_node_and_a_closure():
    assert "1 node" in found()[0]["odd nodes"]
    assert all("closure" in rank["closure"] for rank in found())


def test_every_algorithm_refuses_a_parameter_that_is_unfrozen_later():
    """It is in no bucket, so ranks would not exchange it."""
    for rank in found():
        assert len(rank["unfrozen"]) == 3
        assert all("fc3.weight" in message and "Fix:" in message for message in rank["unfrozen"])


@pytest.mark.parametrize(
    "options", [{"peer_selection_mode": "ring"}, {"communication_interval": 0}]
)
def test_invalid_options_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Decentralized(**options)
