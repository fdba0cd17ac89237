"""Things that happen on one rank only: the run gives the result of all ranks, or one clear error.

``rank_asymmetry.py`` prints the whole table. Ranks of ddp and bagua are started by hand, so each
has its own error. The starter of ddp_spawn or elastic has one error.
"""

import pytest

from .rank_asymmetry import APART, NEEDS, SHARDED, Cell, few_cells, run_cell

#: The cells that run by default; the others are a drill.
DEFAULT = (
    *("all_gather ddp 0", "barrier ddp 1", "import ddp 0", "unused ddp 1", "all_gather bagua 1"),
    "empty ddp 1",
)


def marked():
    for cell in few_cells():
        mark = getattr(pytest.mark, NEEDS.get(cell.strategy, "drill"))
        yield pytest.param(cell, id=str(cell), marks=() if str(cell) in DEFAULT else mark)


@pytest.mark.parametrize("cell", [*marked()])
def test_an_event_on_one_rank(tmp_path, cell: Cell):
    result = run_cell(cell, tmp_path)
    assert not result.wrong, f"{result.outcome}\n{result.printed}"
    if cell.expected == APART and cell.strategy not in SHARDED:
        assert f"rank {cell.one} in " in result.outcome
        assert f"rank {1 - cell.one} in " in result.outcome
        assert "rank_asymmetry.py:" in result.outcome
