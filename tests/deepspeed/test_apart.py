"""Ranks that part under deepspeed; tests/sharded/test_apart.py has more ways."""

import re

import pytest
from several_ranks import results

from .cases import STAGES, part

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(300)]


@pytest.mark.parametrize("event", ["all_gather", "part", "leaf"])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_part_end_the_run(tmp_path, stage, event):
    ends = results(tmp_path, part, stage, event, seconds=100)
    texts = [text for text, _ in ends]
    message = r"different collectives: rank 0 in .*; rank 1 in |rank 1 did not use"
    assert any(re.search(message, text) for text in texts), texts
    assert "no error" not in texts
    assert 0 < ends[1][1] < 15


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_one_rank_changes_alone_is_found(tmp_path, stage):
    texts = [text for text, _ in results(tmp_path, part, stage, "weight", seconds=100)]
    message = "rank 1: first.weight was changed, and in stage 3"
    if stage < 3:
        message = "rank 1 differs from rank 0: the number of changes of first.weight. Fix: change "
    assert any(message in text for text in texts), texts
    assert "no error" not in texts
