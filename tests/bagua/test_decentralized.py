"""The algorithm decentralized: weights are averaged during forward and backward."""

from types import SimpleNamespace

import pytest
import torch
from regression import Net, one_trainer, samples, weights
from several_ranks import kept_by
from torch.utils.data import DataLoader

from geartrain import UsageError
from geartrain_bagua import BaguaStrategy
from geartrain_bagua.algorithms.decentralized import Decentralized

from . import reference_weights as reference
from .hand import DEADLINE, Hand, assert_starts_from_rank_0, case, elastic, four_ranks, this_rank

pytestmark = pytest.mark.timeout(DEADLINE + 60)

STEPS = 6
#: With four ranks, gloo adds the weights in another order than the reference.
ORDER = {"rtol": 1e-6, "atol": 1e-7}


def train_each_case():
    with four_ranks():
        kept = {
            f"{mode} {interval} {ranks}": case(Decentralized(False, mode, interval), ranks=ranks)
            for mode, interval in (("all", 1), ("all", 3), ("shift_one", 1), ("shift_one", 2))
            for ranks in (2, 4)
        }
        kept["all nodes"] = case(Decentralized(), node=2)
        kept["shift_one nodes"] = case(Decentralized(peer_selection_mode="shift_one"), node=2)
        kept["all one node"] = case(Decentralized(), node=4)
        for name, options in {
            "momentum": {"kind": "momentum"},
            "two optimizers": {"kind": "two"},
            "accumulation and clipping": {"micros": 3, "clip": 0.01},
            "many buckets": {"bucket_bytes": 64},
        }.items():
            kept[name] = case(Decentralized(False), ranks=2, **options)
        kept["on other ranks"] = elastic(lambda: Decentralized(False, "shift_one", 2))
        if this_rank() == 0:
            with pytest.raises(UsageError) as refused:
                Hand(Decentralized(peer_selection_mode="shift_one"), node=4)
            kept["odd nodes"] = str(refused.value)
    return kept


found = kept_by(train_each_case, ranks=4, seconds=DEADLINE)


def same(found, name, expected, exact=True, ranks=4):
    """Compare every rank's weights after every step; a case of two ranks ran twice."""
    for rank in range(4):
        ours = found[rank][name]["history"]
        assert len(ours) == len(expected)
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(
                mine, theirs[rank % ranks], **({"rtol": 0, "atol": 0} if exact else ORDER)
            )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("mode", "interval"), [("all", 1), ("all", 3), ("shift_one", 1), ("shift_one", 2)]
)
def test_trains_as_the_reference(found, mode, interval, ranks):
    expected = reference.decentralized(ranks, STEPS, mode, interval)
    exact = ranks == 2 or mode == "shift_one"
    same(found, f"{mode} {interval} {ranks}", expected, exact=exact, ranks=ranks)
    assert not torch.equal(expected[-1][0], expected[-1][1])


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_average_inside_each_node_first(found, mode):
    same(found, f"{mode} nodes", reference.decentralized(4, STEPS, mode, node=2))


def test_one_node_is_the_average_over_all(found):
    same(found, "all one node", reference.decentralized(4, STEPS), exact=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("momentum", {"kind": "momentum"}),
        ("two optimizers", {"kind": "two"}),
        ("accumulation and clipping", {"micros": 3, "clip": 0.01}),
        ("many buckets", {}),
    ],
)
def test_every_kind_of_step_exchanges_once(found, name, options):
    same(found, name, reference.decentralized(2, STEPS, **options), ranks=2)


def test_the_case_of_many_buckets_has_four(found):
    assert len(found[0]["many buckets"]["buckets"]) == 4


def test_forward_and_backward_see_the_weights_from_before(found):
    assert all(
        rank[name]["seen"] == [True] * STEPS
        for rank in found
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


def test_a_run_resumed_on_other_ranks_starts_from_rank_0s_weights(found):
    for kept in found:
        assert_starts_from_rank_0(kept["on other ranks"], 3)


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


def test_ranks_refuse_one_node(found):
    assert "1 node" in found[0]["odd nodes"]


@pytest.mark.parametrize(
    "options", [{"peer_selection_mode": "ring"}, {"communication_interval": 0}]
)
def test_invalid_options_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Decentralized(**options)
