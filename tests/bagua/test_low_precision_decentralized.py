"""The algorithm low_precision_decentralized: ranks send changes of weights to their neighbours."""

import copy
from types import SimpleNamespace

import pytest
import torch
from several_ranks import kept_by

from geartrain import UsageError
from geartrain_bagua.algorithm import Context, Peers
from geartrain_bagua.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from geartrain_bagua.buckets import make_buckets

from . import reference_weights as reference
from .hand import DEADLINE, assert_starts_from_rank_0, case, elastic, four_ranks

pytestmark = pytest.mark.timeout(DEADLINE + 60)

STEPS = 6


def train_each_case():
    with four_ranks():
        kept = {
            f"{interval} {ranks}": case(LowPrecisionDecentralized(False, interval), ranks=ranks)
            for interval, ranks in ((1, 2), (1, 4), (3, 4))
        }
        kept["many buckets"] = case(LowPrecisionDecentralized(False), bucket_bytes=64)
        kept["momentum"] = case(LowPrecisionDecentralized(False), kind="momentum")
        kept["nodes"] = case(LowPrecisionDecentralized(), node=2)
        kept["one node"] = case(LowPrecisionDecentralized(), ranks=2, node=2)
        kept["on other ranks"] = elastic(lambda: LowPrecisionDecentralized(False, 2))
    return kept


found = kept_by(train_each_case, ranks=4, seconds=DEADLINE)


def same(found, name, ranks, node=None, **options):
    lengths = found[0][name]["buckets"]
    expected, replicas = reference.low_precision(ranks, STEPS, lengths, node=node, **options)
    for rank in range(4):
        kept = found[rank][name]
        for mine, theirs in zip(kept["history"], expected, strict=True):
            assert torch.equal(mine, theirs[rank % ranks])
        if rank % (node or 1) == 0:
            for which, value in replicas[rank % ranks // (node or 1)].items():
                assert torch.equal(kept[which], value), which


@pytest.mark.parametrize(("interval", "ranks"), [(1, 2), (1, 4), (3, 4)])
def test_trains_as_the_reference(found, interval, ranks):
    name = f"{interval} {ranks}"
    same(found, name, ranks, interval=interval)
    first, second = (found[rank][name]["history"][-1] for rank in (0, 1))
    assert not torch.equal(first, second)


def test_each_bucket_is_one_chunk(found):
    assert len(found[0]["many buckets"]["buckets"]) == 4
    same(found, "many buckets", 4)


def test_trains_as_the_reference_with_momentum(found):
    same(found, "momentum", 4, kind="momentum")


def test_a_hierarchical_ring_has_one_rank_per_node(found):
    same(found, "nodes", 4, node=2)
    for rank in (1, 3):
        assert "own" not in found[rank]["nodes"]
    same(found, "one node", 2, node=2)


@pytest.mark.parametrize(
    ("name", "ranks"), [("1 2", 2), ("1 4", 4), ("3 4", 4), ("many buckets", 4)]
)
def test_copies_of_neighbours_equal_their_own_weights(found, name, ranks):
    """Bagua's test compares norms; this one compares bits."""
    kept = [rank[name] for rank in found[:ranks]]
    for rank in range(ranks):
        left, right = kept[(rank - 1) % ranks], kept[(rank + 1) % ranks]
        assert torch.equal(kept[rank]["own"], left["right"])
        assert torch.equal(kept[rank]["own"], right["left"])
        assert not torch.equal(kept[rank]["own"], right["own"])


def test_after_an_exchange_weights_equal_the_neighbours_copies(found):
    for rank in found:
        assert torch.equal(rank["1 4"]["history"][-1], rank["1 4"]["own"])
        assert not torch.equal(rank["3 4"]["history"][-1], rank["3 4"]["own"])


def test_a_run_resumed_on_other_ranks_starts_from_rank_0s_weights(found):
    for kept in found:
        assert_starts_from_rank_0(kept["on other ranks"], 3)


def test_one_rank_alone_trains_as_without_a_strategy():
    module, plain = reference.net(), reference.net()
    algorithm = LowPrecisionDecentralized()
    algorithm.set_up(
        Context(
            SimpleNamespace(
                loop=SimpleNamespace(needs_closure=False),
                module=module,
                optimizers=[],
                schedulers=[],
            ),
            make_buckets(module.parameters()),
            None,
            Peers(None, 0, 1, (0,)),
        )
    )
    for step in range(3):
        for one in (module, plain):
            reference.backward(one, 0, step)
            reference.optimizers(one)[0].step()
        algorithm.end_step()
    assert torch.equal(reference.flat(module), reference.flat(plain))


def test_optimizers_keep_their_groups_which_schedulers_and_wrappers_refer_to():
    module, one = reference.net(), Peers(None, 0, 1, (0,))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    run = SimpleNamespace(
        loop=SimpleNamespace(needs_closure=False),
        module=module,
        optimizers=[optimizer],
        schedulers=[],
    )
    context = Context(run, make_buckets(module.parameters()), None, one)
    saved, resumed = LowPrecisionDecentralized(), LowPrecisionDecentralized()
    saved.set_up(context)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    group, slots = optimizer.param_groups[0], optimizer.state
    group["lr"] = 5.0
    resumed.set_up(context)
    assert optimizer.param_groups[0] is group
    assert optimizer.state is slots
    assert group["lr"] == 0.1


def test_a_state_of_other_nodes_is_refused():
    module, one = reference.net(), Peers(None, 0, 1, (0,))
    run = SimpleNamespace(
        loop=SimpleNamespace(needs_closure=False), module=module, optimizers=[], schedulers=[]
    )
    buckets = make_buckets(module.parameters())
    saved, resumed = LowPrecisionDecentralized(), LowPrecisionDecentralized()
    saved.set_up(Context(run, buckets, None, one, node=one, leaders=one))
    resumed.load_state_dict(saved.state_dict())
    message = "not in the ring of nodes, and was when .* Fix: use the same nodes as in the run"
    with pytest.raises(UsageError, match=message):
        # Without leaders: this rank is not its node's first.
        resumed.set_up(Context(run, buckets, None, one, node=one))


def test_an_interval_of_0_is_refused():
    with pytest.raises(UsageError, match="communication_interval"):
        LowPrecisionDecentralized(communication_interval=0)
