"""all_gather, broadcast and log_sync with every dtype and shape on three ranks, and their names."""

import pytest
import torch

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "what",
    [
        *("bool", "bfloat16", "float16", "complex", "conjugate", "scalar", "int8"),
        *("uneven", "uneven bool", "empty", "columns", "channels last"),
    ],
)
def test_all_gather(three_ranks, what):
    given = [kept["gathered"]["given"][what] for kept in three_ranks]
    for kept in three_ranks:
        found = kept["gathered"]["gathered"][what]
        assert isinstance(found, list) == what.startswith("uneven")
        assert len(found) == 3
        for mine, theirs in zip(given, found, strict=True):
            assert theirs.dtype == mine.dtype
            assert theirs.shape == mine.shape
            assert torch.equal(theirs, mine)


def test_tensors_that_cannot_be_gathered_are_named_on_every_rank(three_ranks):
    for kept in three_ranks:
        shapes, types, dimensions = kept["gathered"]["errors"]
        assert "rank 0 has the shape [2, 1] and rank 1 [2, 2]" in shapes
        assert "rank 0 and rank 1 have tensors of different types" in types
        assert "[1]" in dimensions
        assert "[1, 1]" in dimensions


def test_log_sync(three_ranks):
    for kept in three_ranks:
        assert kept["gathered"]["nothing"].shape == (3, 0)
        expected = torch.tensor([[rank + 0.1, 1e300] for rank in range(3)], dtype=torch.float64)
        assert torch.equal(kept["gathered"]["values"], expected)


def test_every_operation_has_a_name_that_is_the_same_on_every_rank(three_ranks):
    for case, first in three_ranks[0].items():
        if "sent" not in first:
            continue
        operations = [
            sorted(str(name) for what, name in kept[case]["sent"] if what != "backward")
            for kept in three_ranks
        ]
        assert operations[0], case
        if case.startswith("distributed"):
            continue  # Horovod's optimizer uses the names that it was given
        assert not any(name == "None" for name in operations[0]), case
        if "process set" not in case:
            assert operations[0] == operations[1] == operations[2], case
        assert all(name.startswith("geartrain.") for name in operations[0]), case
        assert first["sent"], case


def test_each_run_of_a_program_has_its_own_names(three_ranks):
    sent = [kept["sent"] for kept in three_ranks[0].values() if "sent" in kept]
    prefixes = [
        {name.split(".")[1] for _, name in names if name and name.startswith("geartrain.")}
        for names in sent
    ]
    assert all(len(found) == 1 for found in prefixes)
    assert len({next(iter(found)) for found in prefixes}) == len(prefixes)


def test_processes_that_a_rank_starts_later_are_not_horovod_ranks(three_ranks):
    assert all(kept["average"]["left"] == [] for kept in three_ranks)


def test_a_waiting_thread_sleeps_between_polls(three_ranks):
    """Otherwise the wait would use a whole core. Horovod's background thread is not measured."""
    for kept in (three_ranks[0], three_ranks[2]):
        assert kept["waiting"]["waited"] > 1
        assert kept["waiting"]["share"] < 0.4
