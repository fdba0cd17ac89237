"""Reduction of the gradients of three ranks: each step's gradients before and after it."""

from pathlib import Path

import pytest
import torch

from geartrain_testing.launching import launched

HERE = Path(__file__).parent
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(400)]


def ours(three_ranks, case, step, when="after"):
    """Return each parameter's gradients on all ranks, by name."""
    per_rank = [kept[case][when][step] for kept in three_ranks]
    return {name: [grads[name] for grads in per_rank] for name in per_rank[0]}


def reduced(three_ranks, case, ranks=(0, 1, 2), total=torch.mean, **tolerance):
    """Check every step's reduced gradients and return their number.

    Each must equal ``total`` of the gradients of ``ranks``; a rank without a gradient counts as
    zeros. If no rank had a gradient, no rank has one afterwards.
    """
    checked = 0
    for step in range(len(three_ranks[0][case]["after"])):
        before, after = ours(three_ranks, case, step, "before"), ours(three_ranks, case, step)
        for name, grads in before.items():
            have = [grads[rank] for rank in ranks if grads[rank] is not None]
            for rank in ranks:
                found = after[name][rank]
                if not have:
                    assert found is None, f"{name}: no rank has used it"
                    continue
                whole = torch.stack(
                    [torch.zeros_like(have[0]) if grads[r] is None else grads[r] for r in ranks]
                )
                expected = total(whole.to(torch.promote_types(whole.dtype, torch.float32)), dim=0)
                torch.testing.assert_close(found, expected.to(found.dtype), **tolerance)
                assert torch.equal(found, after[name][ranks[0]]), f"{name} differs between ranks"
                checked += 1
    return checked


@pytest.mark.parametrize(
    "case",
    [
        *("average", "groups", "one rank only", "channels last", "complex", "float64", "sparse"),
        *("unfrozen", "accumulated", "passes given"),
    ],
)
def test_gradients_become_their_mean(three_ranks, case):
    assert reduced(three_ranks, case) > 12


def test_gradients_become_their_sum(three_ranks):
    assert reduced(three_ranks, "sum", total=torch.sum) > 12


@pytest.mark.parametrize("case", ["fp16", "predivided", "complex fp16"])
def test_gradients_sent_in_float16_or_divided_first(three_ranks, case):
    assert reduced(three_ranks, case, rtol=5e-3, atol=1e-4) > 12
    if case == "predivided":
        assert set(three_ranks[0][case]["scales"]) == {(1 / 4, 4)}
        assert set(three_ranks[0]["average"]["scales"]) == {(1, 1)}
        return
    name, plain = {"fp16": ("last.weight", "average"), "complex fp16": ("turn", "complex")}[case]
    compressed = ours(three_ranks, case, 0)[name]
    assert not any(map(torch.equal, compressed, ours(three_ranks, plain, 0)[name])), (
        "nothing was compressed"
    )
    assert all(
        found.dtype == (torch.complex64 if name == "turn" else torch.float32)
        for found in compressed
    )


@pytest.mark.parametrize("case", ["bfloat16", "bfloat16 in groups"])
def test_gradients_in_bfloat16_which_horovod_does_not_support(three_ranks, case):
    assert reduced(three_ranks, case, rtol=1e-2, atol=1e-3) > 12
    assert all(found.dtype == torch.bfloat16 for found in ours(three_ranks, case, 0)["last.weight"])


def test_only_ranks_of_a_process_set_reduce(three_ranks):
    assert reduced(three_ranks, "process set", ranks=(0, 2)) > 12
    for step in range(3):
        before, after = (
            ours(three_ranks, "process set", step, "before"),
            ours(three_ranks, "process set", step),
        )
        assert all(torch.equal(before[name][1], after[name][1]) for name in before), (
            "rank 1 is outside"
        )
    ends = [kept["process set"]["ended"]["last.weight"] for kept in three_ranks]
    assert torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], ends[1])


def test_a_closure_in_a_process_set_is_refused(tmp_path):
    with launched(str(HERE / "trainings.py"), str(tmp_path), "closure", folder=tmp_path) as run:
        assert run.wait(120) != 0
        assert (
            "LBFGS decides how often it calls its closure, and ranks outside process_set=[0, 2]"
            in run.err
        )
        assert "Fix: use another optimizer, or no process_set" in run.err


def test_a_checkpoint_has_no_weights_of_ranks_outside(three_ranks):
    warning = (
        "ranks outside process_set=[0, 2] resume from rank 0's weights: a checkpoint has no others"
    )
    assert [kept["resumed in a set"]["warnings"] for kept in three_ranks] == [[warning], [], []]


def test_a_parameter_of_one_rank_alone(three_ranks):
    """Only rank 1 uses ``extra``, in the second step, so the others send zeros.

    No rank uses ``unused``, so weight decay must not change it.
    """
    for case in ("one rank only", "groups"):
        before = ours(three_ranks, case, 1, "before")["extra.weight"]
        assert [grad is None for grad in before] == [True, False, True]
        for found in ours(three_ranks, case, 1)["extra.weight"]:
            torch.testing.assert_close(found, before[1] / 3)
        for step in (0, 2):
            assert all(found is None for found in ours(three_ranks, case, step)["extra.weight"])
        for kept in three_ranks:
            assert torch.equal(
                kept[case]["started"]["unused.weight"], kept[case]["ended"]["unused.weight"]
            )


def test_sparse_gradients_stay_sparse(three_ranks):
    """SparseAdam refuses a dense gradient. Rank 2 has no gradient in the second step."""
    before = ours(three_ranks, "sparse", 1, "before")["table.weight"]
    assert before[2] is None
    assert torch.equal(
        three_ranks[2]["sparse"]["ended"]["table.weight"],
        three_ranks[0]["sparse"]["ended"]["table.weight"],
    )


def test_parameters_that_are_unfrozen_later(three_ranks):
    assert all(found is None for found in ours(three_ranks, "unfrozen", 0)["first.weight"])
    for step in (1, 2):
        first, *others = ours(three_ranks, "unfrozen", step)["first.weight"]
        assert first.abs().sum() > 0
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("case", ["recomputed", "meddled"])
def test_gradients_that_change_after_they_were_sent(three_ranks, case):
    """The last value is reduced.

    A reentrant checkpoint adds to a gradient again, and a callback changes one on rank 1 only.
    """
    assert reduced(three_ranks, case) > 12
    sent = [
        name
        for _, name in three_ranks[0][case]["sent"]
        if name and name.endswith("second.weight.again")
    ]
    assert len(sent) == 3, "once in each step"


def test_gradients_are_sent_while_backward_computes(three_ranks):
    for kept in three_ranks:
        seen = [
            (what, name)
            for what, name in kept["average"]["sent"]
            if what in ("allreduce_async_", "backward")
        ]
        step = seen[: seen.index(("backward", "first.weight")) + 1]
        early = [
            name.rpartition("gradient.")[2] for what, name in step if what == "allreduce_async_"
        ]
        assert {"last.weight", "last.bias", "second.weight", "second.bias"} <= set(early)
        assert "first.weight" not in early


def test_with_accumulation_each_gradient_is_sent_once_a_step(three_ranks):
    for case in ("accumulated", "passes given"):
        names = [
            name
            for what, name in three_ranks[0][case]["sent"]
            if what == "allreduce_async_" and "gradient.last.weight" in name
        ]
        assert len(names) == 2, "three batches in windows of two, each sent once"


def test_a_group_is_sent_as_a_whole(three_ranks):
    sent = [
        name
        for what, name in three_ranks[0]["groups"]["sent"]
        if what == "grouped_allreduce_async_"
    ]
    assert len(set(sent)) == 2, "three groups, and no rank uses a parameter of the last"
    assert len(sent) == 6, "in three steps"


@pytest.mark.parametrize("case", ["distributed optimizer", "distributed optimizer, accumulated"])
def test_horovods_optimizer_gives_the_same_weights(three_ranks, case):
    plain = "accumulated" if "accumulated" in case else "average"
    for kept in three_ranks:
        for name, expected in kept[plain]["ended"].items():
            torch.testing.assert_close(kept[case]["ended"][name], expected)
        assert torch.equal(
            kept[case]["ended"]["last.weight"], three_ranks[0][case]["ended"]["last.weight"]
        )


@pytest.mark.parametrize(
    "case", ["sum", "fp16", "predivided", "process set", "one rank only", "groups"]
)
def test_horovods_optimizer_with_options_gives_the_same_weights(three_ranks, case):
    tolerance = {"rtol": 5e-3, "atol": 1e-4} if case == "fp16" else {}
    for kept in three_ranks:
        expected, found = kept[case]["ended"], kept[f"distributed optimizer, {case}"]["ended"]
        for name in expected:
            # Parameters that no rank uses get zeros, so weight decay changes them.
            if not name.startswith(("unused", "extra")):
                torch.testing.assert_close(found[name], expected[name], **tolerance)
    ends = [kept[f"distributed optimizer, {case}"]["ended"]["last.weight"] for kept in three_ranks]
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[0], ends[1]) == (case != "process set")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unfrozen", "first.weight was frozen"),
        ("recomputed", "one backward computed a gradient several times"),
        ("sparse", "table.weight has a sparse gradient"),
    ],
)
def test_horovods_optimizer_refuses_gradients_that_would_differ(tmp_path, case, words):
    with launched(
        str(HERE / "trainings.py"), str(tmp_path), case, folder=tmp_path, RANKS="2"
    ) as run:
        assert run.wait(120) != 0
        assert words in run.err
        assert "Fix: distributed_optimizer=False" in run.err


def test_a_peer_that_left_before_horovods_hooks_send_is_reported(tmp_path):
    """The hooks raise within backward, before any rank waits."""
    with launched(
        str(HERE / "trainings.py"), str(tmp_path), "left", folder=tmp_path, RANKS="2"
    ) as run:
        assert run.wait(120) != 0
    error = (tmp_path / "error-0").read_text()
    assert error.startswith(
        "TrainingError: rank 0: start of all-reduce of hvd.DistributedOptimizer: a peer has gone"
    )


def test_the_users_optimizer_can_be_pickled(three_ranks):
    assert all(
        kept[case]["pickled"][0] > 0
        for kept in three_ranks
        for case in ("average", "distributed optimizer")
    )
