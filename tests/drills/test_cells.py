"""Cells of the table of failures: every event, kind of loader worker and rank, ddp and ddp_spawn.

``failure_cells.py`` runs all cells. By default only the cell runs that kills a rank with loader
workers.
"""

import pytest

from geartrain_testing.launching import HAS_PROC

from .failure_cells import Cell, run_cells

pytestmark = [
    pytest.mark.skipif(not HAS_PROC, reason="finds processes through /proc"),
    pytest.mark.timeout(300),  # the first test runs all cells
]
CELLS = [
    "ddp:1:fork:kill:1",
    *(
        pytest.param(cell, marks=pytest.mark.matrix)
        for cell in (
            "ddp_spawn:2:fork:kill:0",
            "ddp:2p:fork:success:0",
            "ddp:1:fork:sample:0",
            "ddp:2p:fork:step:1",
            "ddp:0:-:exit:0",
            "ddp:2:fork:exit:1",
            "ddp_spawn:2p:fork:success:0",
            "ddp_spawn:1:spawn:sample:1",
        )
    ),
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Run the cells that this session tests; return their results by cell."""
    items = [item for item in request.session.items if item.path == request.path]
    cells = [Cell.parse(item.callspec.params["cell"]) for item in items]
    return {
        result.cell.id: result
        for result in run_cells(cells, 2, "forkserver", tmp_path_factory.mktemp("cells"))
    }


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_ends_in_time_with_the_users_error_and_leaves_nothing(results, cell):
    assert results[cell].wrong == [], results[cell].printed
