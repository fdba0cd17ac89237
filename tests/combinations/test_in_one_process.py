"""Combinations of data, options, callbacks and endings in one process: one rank, or two threads."""

import multiprocessing
import threading

import pytest

from .case import FACTORS, INTERRUPTED, Case, OwnError, differences, train, unexpected_files
from .pairwise import pairs_of, pairwise

IN_PROCESS = {
    "strategy": ["single", "threads"],
    **FACTORS,
    "ending": ["done", "stopped", "error", "resumed"],
}
CASES = [Case(**row) for row in pairwise(IN_PROCESS)]


def test_every_pair_of_values_occurs():
    factors = {"a": [1, 2, 3], "b": [1, 2], "c": ["x", "y"]}
    never = frozenset([("a", 1), ("b", 2)])
    rows = pairwise(factors, [never])
    met = {pair for row in rows for pair in pairs_of(row)}
    assert never not in met
    assert len(met) == 3 * 2 + 3 * 2 + 2 * 2 - 1
    assert len(rows) < 3 * 2 * 2 - 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_run_has_the_result_of_one_process_and_leaves_nothing(case, tmp_path):
    threads = set(threading.enumerate())
    if case.ending == "error":
        with pytest.raises(OwnError):
            train(case, tmp_path / "run", 1)
    else:
        found = train(case, tmp_path / "run", 1)
    if case.ending in INTERRUPTED:
        found = train(case, tmp_path / "run", 2)
    assert differences(case, found, train(case, tmp_path / "reference", 1, reference=True)) == []
    assert unexpected_files(tmp_path / "run") == []
    assert multiprocessing.active_children() == []
    assert set(threading.enumerate()) <= threads  # a thread of an earlier test may have ended
