"""A failed set-up is undone: Horovod is shut down, its rendezvous ends, and the next run works.

Also tests how one process initialises and leaves Horovod.
"""

from pathlib import Path

import pytest
import torch

from geartrain_testing.launching import launched

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(300)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("halfway")
    with launched(str(HERE / "halfway.py"), str(folder), folder=folder) as run:
        run.succeed(200)
    return torch.load(folder / "halfway.pt", weights_only=False)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("agree", ("WorldChanged: rank 0: agreement on a commit: a peer has gone",)),
        ("init", ("rank 0: Horovod could not connect to its peers: as Horovod says it",)),
        (
            "size",
            (
                "geartrain started 1 processes, and Horovod made a world of 7",
                "each would train alone",
                "Fix: ",
            ),
        ),
        (
            "timeline",
            (
                "timeline.json'",
                "cannot write a timeline now (as Horovod says it)",
                "Fix: leave out hvd.init()",
            ),
        ),
    ],
)
def test_a_failed_set_up_is_undone(kept, case, words):
    for word in words:
        assert word in kept[case]["error"]
    assert kept[case]["threads"] == []
    assert not kept[case]["initialised"]
    assert kept[case]["steps"] == 1, "the next run works"


def test_the_user_can_set_the_gloo_timeout(kept):
    assert kept["silence"] == [["20"], ["45"]]


def test_a_program_that_calls_init_itself_is_refused(kept):
    alone, refused, after = kept["hvd.init()"]
    assert alone is after is None, "one process needs a world of one"
    for word in (
        "Horovod is initialised already, as a world of 1",
        "the program called hvd.init()",
        "Fix: leave out hvd.init()",
    ):
        assert word in refused


def test_no_second_run_after_mpi_was_left(kept):
    before, after = kept["mpirun"]
    assert before is None
    assert (
        "this program's last run failed and left MPI, which a process can join only once. "
        "Fix: start the program again"
    ) in after
