"""The supervisor's verdict for a table of failures, with fake ranks and a fake clock.

tests/ddp/test_faults.py and tests/spawn/test_failures.py test some of these with real ranks.
"""

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from geartrain_parallel import supervisor as supervisors
from geartrain_parallel.failures import Failure, judge
from geartrain_parallel.patience import Patience
from geartrain_parallel.reports import ERROR_FILE, begin, report
from geartrain_parallel.supervisor import Supervisor

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
WAITED = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 4000ms for recv operation to complete"
)
OWN = "KeyError: 'my own error'"
LATE = "did not come to a collective within the strategy's timeout (hung or stopped): "
LEFT = "left the program before the run ended (exit code 0, as after os._exit(0))"


@dataclass
class Rank:
    """A rank that behaves like a row of the table, at times of the fake clock."""

    clock: list[float]
    number: int
    #: The time and the message of the error that it reports.
    reports: tuple[float, str] | None = None
    #: The time of its end, and its exit code.
    ends: tuple[float, int] | None = None
    #: The times between which it is stopped.
    stops: tuple[float, float] | None = None

    @property
    def pid(self):
        return 1000 + self.number

    def poll(self):
        return self.ends[1] if self.ends and self.ends[0] <= self.clock[0] else None

    def error(self):
        if self.reports and self.reports[0] <= self.clock[0]:
            return Failure(self.number, *self.reports)
        return None

    def is_stopped(self):
        return (
            self.stops is not None
            and self.stops[0] <= self.clock[0] < self.stops[1]
            and self.poll() is None
        )


#: Name -> events of ranks in the 20 s until their supervisor ends them, and its message.
TABLE = {
    "nothing": ({1: {}, 2: {}}, None),
    "an error": ({1: {"reports": (5, OWN), "ends": (6, 1)}}, f"rank 1 failed: {OWN}"),
    "a signal": ({1: {"ends": (5, -9)}}, "rank 1 was ended by SIGKILL"),
    "a real-time signal": ({1: {"ends": (5, -40)}}, "rank 1 was ended by signal 40"),
    "an exit code": ({1: {"ends": (5, 7)}}, "rank 1 failed: exit code 7"),
    "a signal after an error, in teardown": (
        {1: {"reports": (5, OWN), "ends": (6, -6)}},
        f"rank 1 failed: {OWN}",
    ),
    "an error, and no end yet": (
        {1: {"reports": (5, OWN)}, 2: {"reports": (6, LOST)}},
        f"rank 1 failed: {OWN}",
    ),
    # --- of two
    "the earlier error": (
        {1: {"reports": (6, OWN), "ends": (6, 1)}, 2: {"reports": (5, "E: x"), "ends": (9, 1)}},
        "rank 2 failed: E: x",
    ),
    "the earlier error, not seen to end": (
        {1: {"reports": (6, OWN), "ends": (6, 1)}, 2: {"reports": (5, "E: x")}},
        "rank 2 failed: E: x",
    ),
    "an error and a rank that lost its peer": (
        {1: {"reports": (5, LOST), "ends": (5, 1)}, 2: {"reports": (6, OWN)}},
        f"rank 2 failed: {OWN}",
    ),
    "a signal and a rank that lost its peer": (
        {1: {"reports": (5, LOST), "ends": (5, 1)}, 2: {"ends": (6, -9)}},
        "rank 2 was ended by SIGKILL",
    ),
    "a crash after an error": (
        {1: {"reports": (5, OWN)}, 2: {"ends": (6, -6)}},
        f"rank 1 failed: {OWN}",
    ),
    "an error after a crash": (
        {1: {"reports": (7, OWN)}, 2: {"ends": (6, -11)}},
        "rank 2 was ended by SIGSEGV",
    ),
    "only lost connections": (
        {1: {"reports": (6, LOST), "ends": (6, 1)}, 2: {"reports": (5, LOST)}},
        f"rank 2 failed: {LOST}",
    ),
    # --- late
    "a rank that hangs": (
        {1: {}, 2: {"reports": (5, WAITED), "ends": (5, 1)}},
        f"rank 1 {LATE}rank 2 failed: {WAITED}",
    ),
    "ranks that hang": (
        {1: {}, 2: {"reports": (5, WAITED), "ends": (5, 1)}, 3: {}, 4: {"reports": (6, LOST)}},
        f"ranks 1, 3 {LATE}rank 2 failed: {WAITED}",
    ),
    "all waited": (
        {1: {"reports": (5, WAITED), "ends": (5, 1)}, 2: {"reports": (6, WAITED)}},
        f"rank 1 failed: {WAITED}",
    ),
    "a loader's timeout": (
        {
            1: {
                "reports": (5, "RuntimeError: DataLoader timed out after 30 seconds"),
                "ends": (5, 1),
            },
            2: {},
        },
        "rank 1 failed: RuntimeError: DataLoader timed out after 30 seconds",
    ),
    "an error while another hangs": (
        {1: {}, 2: {"reports": (5, OWN), "ends": (5, 1)}},
        f"rank 2 failed: {OWN}",
    ),
    # --- left
    "a rank that left, and no error": ({1: {"ends": (5, 0)}, 2: {}}, f"rank 1 {LEFT}"),
    "a rank that left": (
        {1: {"ends": (5, 0)}, 2: {"reports": (6, LOST), "ends": (6, 1)}},
        f"rank 1 {LEFT}",
    ),
    "a rank that left, another error": (
        {1: {"ends": (5, 0)}, 2: {"reports": (6, OWN), "ends": (6, 1)}},
        f"rank 2 failed: {OWN}",
    ),
    # --- stopped: for 15 s
    "a stopped rank": (
        {1: {"stops": (1, 99)}, 2: {}},
        "rank 1 failed: it has been stopped (SIGSTOP) for 15 s",
    ),
    "a stopped rank and one that waited": (
        {1: {"stops": (1, 99)}, 2: {"reports": (17, WAITED), "ends": (17, 1)}},
        "rank 1 failed: it has been stopped (SIGSTOP) for 15 s",
    ),
    "a stopped rank, killed for it": (
        {1: {"stops": (1, 99), "ends": (18, -9)}, 2: {}},
        "rank 1 failed: it has been stopped",
    ),
    "a rank that is stopped for less": ({1: {"stops": (1, 12)}, 2: {}}, None),
}


@pytest.fixture
def clock():
    return [0.0]


def supervised(clock, monkeypatch, rows):
    """Return a supervisor of ranks that behave like the rows, when it has begun to end them."""
    ranks = [Rank(clock, number, **row) for number, row in rows.items()]
    monkeypatch.setattr(
        supervisors,
        "is_stopped",
        lambda pid: next(rank for rank in ranks if rank.pid == pid).is_stopped(),
    )
    supervisor = Supervisor(ranks, Path(), Patience(), lambda: clock[0])
    for second in range(21):
        clock[0] = second
        supervisor.look()
    assert len(supervisor.failures) == len({failure.rank for failure in supervisor.failures}), (
        "a rank fails once"
    )
    supervisor.begin_end()
    return supervisor


@pytest.mark.parametrize("name", TABLE)
def test_the_verdict_names_the_rank_to_blame(clock, monkeypatch, name):
    rows, said = TABLE[name]
    supervisor = supervised(clock, monkeypatch, rows)
    verdict = supervisor.judge(left=supervisor.succeeded)
    if said is None:
        assert verdict is None
    else:
        assert verdict.message.startswith(said), verdict.message


def test_failures_of_ranks_that_the_supervisor_ends_are_ignored(clock, monkeypatch):
    supervisor = supervised(
        clock,
        monkeypatch,
        {
            1: {"ends": (25, -15)},
            2: {"reports": (25, OWN), "ends": (26, 1)},
            3: {"stops": (10, 99)},
        },
    )
    assert supervisor.running == supervisor.silent == [1, 2, 3]
    clock[0] = 40
    supervisor.look()
    assert supervisor.failures == []
    supervisor.begin_end()
    assert (supervisor.failures, supervisor.silent) == ([], [1, 2, 3])
    assert supervisor.running == [3]


def test_a_reported_error_has_its_own_time_and_a_silent_end_the_time_of_the_check(
    clock, monkeypatch
):
    supervisor = supervised(
        clock,
        monkeypatch,
        {
            1: {"reports": (4.5, OWN), "ends": (7.5, 1)},
            2: {"ends": (7.5, -9)},
            3: {"stops": (1, 99)},
        },
    )
    assert {failure.rank: failure.when for failure in supervisor.failures} == {1: 4.5, 2: 8, 3: 1}


@pytest.mark.parametrize(
    ("own", "others", "blamed"),
    [
        ((9, LOST), (1, 10, "exit code -11", signal.SIGSEGV), 1),
        ((11, LOST), (1, 10, "exit code -11", signal.SIGSEGV), 1),
        ((11, OWN), (1, 10, "exit code -11", signal.SIGSEGV), 1),
        ((9, OWN), (1, 10, "exit code -11", signal.SIGSEGV), 0),  # rank 1 crashed because of it
        ((11, OWN), (1, 10, LOST, None), 0),
        ((11, LOST), (1, 10, LOST, None), 1),
        ((9, LOST), (1, 10, LOST, None), 0),
        ((11, OWN), (1, 10, "E: x", None), 1),
    ],
)
def test_a_supervisor_that_is_a_rank_is_judged_like_the_others(own, others, blamed):
    rank, when, message, number = others
    assert judge([Failure(rank, when, message, signal=number), Failure(0, *own)]).ranks == [blamed]


def test_an_error_is_reported_in_a_file(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    assert Failure.read(3, path) is None
    monkeypatch.setenv(ERROR_FILE, str(path))
    begin()
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        report(error)
        own = Failure.of(3, 0, error)
    found = Failure.read(3, path)
    assert (
        (found.rank, found.message, found.signal)
        == (3, own.message, None)
        == (3, "ValueError: two\nlines", None)
    )
    assert found.when == json.loads(path.read_text())["message"]["extraInfo"]["when"]
    assert found.describe().startswith(
        "rank 3 failed: ValueError: two\nlines\nTraceback (most recent call last):"
    )
    path.write_text(path.read_text()[:-9])
    assert Failure.read(3, path) is None
    begin()


def test_an_error_without_a_line_of_the_user_is_shown_once_with_its_notes():
    text = "geartrain.errors.UsageError: no. Fix: yes\nraised in hook 'x' of p[y]\n"
    failure = Failure(1, 0, "UsageError: no. Fix: yes", text)
    assert failure.describe() == (
        "rank 1 failed: UsageError: no. Fix: yes\nraised in hook 'x' of p[y]"
    )


def test_an_error_of_torchs_record_can_be_read(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    ErrorHandler().record_exception(KeyError("mine"))
    found = Failure.read(1, tmp_path / "error.json")
    assert found.message == "KeyError: 'mine'"
    assert time.time() - 60 < found.when < time.time() + 1
