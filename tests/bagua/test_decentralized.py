"""decentralized: weights are averaged while forward and backward go on."""

from types import SimpleNamespace

import pytest
import torch
from regression import Net, one_trainer, samples, weights
from torch.utils.data import DataLoader

from geartrain import UsageError
from geartrain_bagua import BaguaStrategy
from geartrain_bagua.algorithms.decentralized import Decentralized

from . import reference_weights as reference
from .weights_ranks import DEADLINE, assert_goes_on, assert_starts_anew, found

#: Whichever comes first runs the program of all three files.
pytestmark = pytest.mark.timeout(DEADLINE + 60)

STEPS = 6
#: Of four ranks, gloo adds the weights in another order than the reference.
ORDER = {"rtol": 1e-6, "atol": 1e-7}


def same(name, expected, exact=True, ranks=4):
    """Every rank's weights after every step; a case of two ranks ran twice."""
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
    same(
        f"{mode} {interval} {ranks}", expected, exact=ranks == 2 or mode == "shift_one", ranks=ranks
    )
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
def test_exchange_once_a_step_whatever_the_step_is(name, options):
    same(name, reference.decentralized(2, STEPS, **options), ranks=2)


def test_many_buckets_were_many():
    assert len(found()[0]["many buckets"]["buckets"]) == 4


def test_forward_and_backward_see_the_weights_from_before():
    assert all(
        rank[name]["seen"] == [True] * STEPS
        for rank in found()
        for name in ("all 1 4", "shift_one 1 4")
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_the_average_itself_is_the_same_bits_on_all_ranks(mode, ranks):
    """Upstream's: with nothing learnt, weights after a step are the average, that of all or of two."""
    for step in range(3):
        weights = [rank[f"averages {mode} {ranks}"][step] for rank in found()[:ranks]]
        for rank in range(ranks):
            for other in range(ranks) if mode == "all" else [reference.peer(rank, ranks, step)]:
                assert torch.equal(weights[rank], weights[other])
        # Of four, the first exchange in pairs makes two, the second one.
        assert len({float(one[0]) for one in weights}) == (
            2 if (mode, ranks, step) == ("shift_one", 4, 0) else 1
        )


def test_partners_are_mutual_and_all_are_met():
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


def test_a_resumed_run_goes_on_as_if_it_had_not_ended():
    assert_goes_on("decentralized", STEPS)


def test_a_run_resumed_on_other_ranks_starts_from_rank_0s_weights():
    assert_starts_anew("decentralized", 3)


def test_upstreams_norm():
    for rank in found():
        assert rank["norm decentralized"] == pytest.approx(2.83537626, abs=1e-6)


# --- what is refused -----------------------------------------------------------------------------------------------------


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
def test_pairs_of_an_odd_number_are_refused_before_anything_starts(
    hierarchical, processes, nodes, named
):
    with pytest.raises(UsageError, match=named) as error:
        Decentralized(hierarchical, "shift_one").check_plan(plan(processes, nodes), object)
    assert "geartrain-bagua[bagua]" in str(error.value)
    assert "Fix:" in str(error.value)


@pytest.mark.parametrize("hierarchical", [True, False])
def test_one_process_has_no_partner_and_trains_as_without(hierarchical):
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
def test_what_fits_is_allowed(hierarchical, mode, processes, nodes):
    Decentralized(hierarchical, mode).check_plan(plan(processes, nodes), object)


def test_what_only_shows_on_the_ranks_is_refused_there():
    assert "1 node" in found()[0]["odd nodes"]
    assert all("closure" in rank["closure"] for rank in found())


def test_what_is_unfrozen_later_is_refused_by_each():
    """It is in no bucket, so ranks would not share it."""
    for rank in found():
        assert len(rank["unfrozen"]) == 3
        assert all("fc3.weight" in message and "Fix:" in message for message in rank["unfrozen"])


@pytest.mark.parametrize(
    "options", [{"peer_selection_mode": "ring"}, {"communication_interval": 0}]
)
def test_options_that_mean_nothing(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Decentralized(**options)
