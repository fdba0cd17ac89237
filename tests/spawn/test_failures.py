"""A rank fails: the caller gets the first error, and no process is left."""

import gc
import os
import signal
import time

import pytest
import torch
import torch._dynamo

import geartrain as gt
from geartrain_spawn import rank as rank_process
from geartrain_spawn.files import AnonymousFile

from .models import AbortsAtExit, Faulty, HangsInTeardown, Net, is_gone, loader, trainer

matrix = pytest.mark.matrix
#: Most seconds from a fault to the end of the run, on a machine with two busy cores.
PROMPT = 30


class Mine(ValueError):
    """An error whose signature needs its ``__reduce__`` for unpickling."""

    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint

    def __reduce__(self):
        return _mine, (self.code, self.hint)


def _mine(code, hint):
    return Mine(code, hint=hint)


class CannotTravel(ValueError):
    def __reduce__(self):
        raise TypeError("no")


class CannotComeBack(ValueError):
    """An error that pickles but does not unpickle."""

    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")


def fails(tmp_path, kind, rank, where="train", method="fork", error=None, module=Faulty, **options):
    """Run until the fault; return the error that the caller got."""
    one = trainer(method, **options)
    with pytest.raises(BaseException) as raised:
        one.fit(module(tmp_path, kind, rank, where, error), loader(), loader(8))
    ended, fault = time.time(), tmp_path / f"fault-{rank}"
    assert rank is None or ended - fault.stat().st_mtime < PROMPT
    assert is_gone(tmp_path, 0)
    assert is_gone(tmp_path, 1)
    return raised.value


LATE = "did not come to a collective within the strategy's timeout (hung or stopped): rank"
LEFT = "left the program before the run ended"
#: Kind of failure -> text of the error after the rank's name. An exception is raised unchanged.
KINDS = {
    "exception": "",
    "SIGKILL": "was ended by SIGKILL",
    "SIGTERM": "was ended by SIGTERM",
    "exit": f"{LEFT}: ",
    "_exit": f"{LEFT} (exit code 0, as after os._exit(0))",
    "hang": LATE,
    "late": LATE,
    "SIGSTOP": "failed: it has been stopped (SIGSTOP) for 1 s",
}
PHASES = ("setup", "train", "validation")
BY_DEFAULT = (("exception", 1, "train"), ("_exit", 1, "train"))
TABLE = [
    pytest.param(kind, rank, phase, marks=() if (kind, rank, phase) in BY_DEFAULT else matrix)
    for kind in KINDS
    for rank in (0, 1)
    for phase in PHASES
]


@pytest.mark.parametrize(("kind", "rank", "where"), TABLE)
def test_a_rank_that_fails(tmp_path, monkeypatch, capfd, kind, rank, where):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "stopped=1" if kind == "SIGSTOP" else "stopped=60")
    error = fails(
        tmp_path,
        kind,
        rank,
        where,
        "forkserver",
        error=Mine(7, hint="look there"),
        output=tmp_path / "out",
    )
    if kind == "exception":
        assert type(error) is Mine
        assert (error.code, error.hint) == (7, "look there")
        assert f"raised on rank {rank}" in error.__notes__
        methods = {"setup": "setup", "train": "training_step", "validation": "validation_step"}
        assert f"in {methods[where]}" in str(error.__cause__)
    else:
        assert type(error) is gt.TrainingError
        assert str(error).startswith(f"rank {rank} {KINDS[kind]}")
    if (kind, rank) == ("exception", 1):
        assert "Mine: code 7" in (tmp_path / "out" / "logs" / "rank-1.log").read_text()
        assert "--- the end of rank 1's output ---" in capfd.readouterr().err
    dead = {rank} if kind in ("SIGKILL", "_exit", "late", "SIGSTOP") else set()
    assert {path.name for path in tmp_path.glob("teardown-*")} == {
        f"teardown-{alive}" for alive in {0, 1} - dead
    }


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param("spawn", "exception", marks=matrix),
        pytest.param("spawn", "SIGKILL", marks=matrix),
        pytest.param("fork", "exception", marks=matrix),
        ("fork", "SIGKILL"),
    ],
)
def test_another_start_method(tmp_path, method, kind):
    error = fails(tmp_path, kind, 1, method=method, error=Mine(7, hint="look there"))
    if kind == "exception":
        assert (type(error), error.code) == (Mine, 7)
    else:
        assert str(error).startswith("rank 1 was ended by SIGKILL")
    assert (tmp_path / "teardown-0").exists()


def test_a_rank_that_hangs_is_named_at_the_strategy_s_timeout(tmp_path):
    error = fails(tmp_path, "hangs alone", 1, strategy_options={"timeout": 2.0})
    assert str(error).startswith(f"rank 1 {LATE} 0 failed: ")
    assert "timed out" in str(error).lower()


def test_an_error_that_cannot_be_pickled_is_reported(tmp_path):
    class Raises(Faulty):
        def fault(self, where):
            if where == "train":
                raise CannotTravel("its text")

    one = trainer()
    with pytest.raises(gt.TrainingError, match=r"rank \d failed: CannotTravel: its text"):
        one.fit(Raises(tmp_path, "", 0), loader())


def test_a_rank_that_is_killed_while_it_writes_its_result_is_named(tmp_path, monkeypatch):
    dump = AnonymousFile.dump

    def half(file, thing):
        dump(file, thing)
        if thing != rank_process.DONE:
            os.truncate(file.descriptor, os.fstat(file.descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(AnonymousFile, "dump", half)  # ranks inherit it, because they are forks
    error = fails(tmp_path, "", None)
    assert isinstance(error, gt.TrainingError)
    assert str(error) == "rank 0 was ended by SIGKILL"


def test_an_error_that_cannot_be_unpickled_is_reported(tmp_path):
    error = fails(tmp_path, "exception", 1, error=CannotComeBack(7, hint="look there"))
    assert isinstance(error, gt.TrainingError)
    assert str(error) == "rank 1 failed: CannotComeBack: code 7"
    assert "in training_step" in str(error.__cause__)


def test_a_crash_at_exit_does_not_hide_the_error(tmp_path):
    error = fails(tmp_path, "exception", 1, error=KeyError("mine"), module=AbortsAtExit)
    assert type(error) is KeyError
    assert "raised on rank 1" in error.__notes__


def test_a_teardown_that_hangs_does_not_hide_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "unwind=0.5,grace=0.5")
    options = {"timeout": 2.0}  # the hanging rank keeps its connections, so the other waits
    error = fails(
        tmp_path,
        "exception",
        0,
        error=KeyError("mine"),
        module=HangsInTeardown,
        strategy_options=options,
    )
    assert isinstance(error, gt.TrainingError)
    assert str(error) == "rank 0 failed: KeyError: 'mine'"


def test_a_rank_that_is_interrupted_is_named(tmp_path):
    error = fails(tmp_path, "exception", 1, error=KeyboardInterrupt())
    assert isinstance(error, gt.TrainingError)
    assert str(error) == "rank 1 was interrupted"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors through /proc")
def test_runs_leave_no_descriptor_and_no_file_in_memory(tmp_path):
    def opened():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    one, module = trainer(max_epochs=1), Net()
    one.fit(module, loader())  # descriptors of the helper process stay open
    before, environment = opened(), dict(os.environ)
    fails(tmp_path, "exception", 1, error=KeyError("mine"))
    one.fit(module, loader())  # works after a run that failed
    predicted = one.predict(module, loader())
    assert len(module.losses) == 12
    assert opened() == before
    assert dict(os.environ) == environment
    with open("/proc/self/maps") as maps:
        assert "memfd:geartrain" not in maps.read()
    assert predicted


# --- refused --------------------------------------------------------------------------------------


def test_unknown_start_method():
    with pytest.raises(
        gt.UsageError,
        match=r"geartrain-spawn\[ddp_spawn\]: start_method='thread' cannot be used here. Fix: fork",
    ):
        trainer("thread")


def test_fork_after_cuda_was_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        gt.UsageError, match="start_method='fork' cannot be used after this process has used CUDA"
    ):
        trainer("fork").fit(Net(), loader())


def test_in_a_process_that_a_launcher_started(monkeypatch):
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 2,
        "TORCHELASTIC_RUN_ID": "x",
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        gt.UsageError, match=r"is one of 2 that torchrun started\. Fix: --strategy ddp"
    ):
        trainer().fit(Net(), loader())


def test_the_backend_s_error_names_this_strategy():
    with pytest.raises(
        gt.UsageError,
        match=r"geartrain-spawn\[ddp_spawn\]: process_group_backend='nccl' cannot be used on cpu",
    ):
        trainer(strategy_options={"process_group_backend": "nccl"}).fit(Net(), loader())
