"""Whatever happens to a rank: the caller gets the error that came first, and nothing is left of the others."""

import gc
import os
import signal
import time

import pytest
import torch

import geartrain as gt
from geartrain.parallel import stopped
from geartrain_spawn import rank as rank_process
from geartrain_spawn import starter
from geartrain_spawn.files import AnonymousFile

from .models import AbortsAtExit, Faulty, HangsInTeardown, Net, is_gone, loader, trainer

METHODS = ["forkserver", "spawn", "fork"]
#: Seconds within which a run must have ended after a fault; generous, for a machine with two busy cores.
PROMPT = 45


class Mine(ValueError):
    """An error with a signature that unpickling must not trip over."""

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
    """It pickles, but what is pickled cannot be made again."""

    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")


def fails(tmp_path, kind, rank, where="train", method="forkserver", error=None, module=Faulty, **options):
    """Run until the fault; the error that the caller got."""
    began = time.monotonic()
    one = trainer(method, **options)
    with pytest.raises(BaseException) as raised:
        one.fit(module(tmp_path, kind, rank, where, error), loader(), loader(8))
    assert time.monotonic() - began < PROMPT
    assert is_gone(tmp_path, 0)
    assert is_gone(tmp_path, 1)
    return raised.value


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_own_error_is_raised_with_its_type_and_traceback(tmp_path, rank, method):
    error = fails(tmp_path, "exception", rank, method=method, error=Mine(7, hint="look there"))
    assert type(error) is Mine
    assert (error.code, error.hint) == (7, "look there")
    assert f"raised on rank {rank}" in error.__notes__
    assert "in training_step" in str(error.__cause__)
    assert {path.name for path in tmp_path.glob("teardown-*")} == {"teardown-0", "teardown-1"}


@pytest.mark.parametrize("where", ["setup", "validation"])
def test_an_error_in_another_phase(tmp_path, where):
    error = fails(tmp_path, "exception", 1, where, error=KeyError("in " + where))
    assert type(error) is KeyError
    assert {path.name for path in tmp_path.glob("teardown-*")} == {"teardown-0", "teardown-1"}


def test_an_error_that_cannot_travel_is_told(tmp_path):
    class Raises(Faulty):
        def fault(self, where):
            if where == "train":
                raise CannotTravel("its text")

    one = trainer()
    with pytest.raises(gt.TrainingError, match=r"rank \d failed: CannotTravel: its text"):
        one.fit(Raises(tmp_path, "", 0), loader())


@pytest.mark.parametrize(
    ("kind", "method"), [("SIGKILL", "forkserver"), ("SIGKILL", "spawn"), ("SIGKILL", "fork"), ("SIGSEGV", "forkserver")]
)
def test_a_rank_that_a_signal_ends_is_named(tmp_path, kind, method):
    error = fails(tmp_path, kind, 1, method=method)
    assert isinstance(error, gt.TrainingError)
    assert str(error).startswith(f"rank 1 was ended by {kind}")
    assert (tmp_path / "teardown-0").exists()


def test_a_rank_that_is_killed_while_it_hands_over_is_named(tmp_path, monkeypatch):
    dump = AnonymousFile.dump

    def half(file, thing):
        dump(file, thing)
        if thing != rank_process.DONE:
            os.truncate(file.descriptor, os.fstat(file.descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(AnonymousFile, "dump", half)  # ranks have it, being forks
    error = fails(tmp_path, "", None, method="fork")
    assert isinstance(error, gt.TrainingError)
    assert str(error) == "rank 0 was ended by SIGKILL"


def test_an_error_that_cannot_come_back_is_told(tmp_path):
    error = fails(tmp_path, "exception", 1, error=CannotComeBack(7, hint="look there"), method="fork")
    assert isinstance(error, gt.TrainingError)
    assert str(error) == "rank 1 failed: CannotComeBack: code 7"
    assert "in training_step" in str(error.__cause__)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_at_exit_does_not_hide_the_error(tmp_path, rank):
    error = fails(tmp_path, "exception", rank, error=KeyError("mine"), module=AbortsAtExit)
    assert type(error) is KeyError
    assert f"raised on rank {rank}" in error.__notes__


def test_a_teardown_without_end_does_not_hide_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "UNWIND", 1.0)
    monkeypatch.setattr(starter, "GRACE", 1.0)
    options = {"timeout": 5.0}  # its connections stay, so the other waits
    error = fails(tmp_path, "exception", 0, error=KeyError("mine"), module=HangsInTeardown, strategy_options=options)
    assert isinstance(error, gt.TrainingError)
    assert str(error) == "rank 0 failed: KeyError: 'mine'"


def test_a_rank_that_is_asked_to_end_tears_down(tmp_path):
    error = fails(tmp_path, "SIGTERM", 1)
    assert isinstance(error, gt.TrainingError)
    assert str(error) == "rank 1 was ended by SIGTERM"
    assert {path.name for path in tmp_path.glob("teardown-*")} == {"teardown-0", "teardown-1"}


def test_a_rank_that_is_interrupted_is_named(tmp_path):
    error = fails(tmp_path, "exception", 1, error=KeyboardInterrupt())
    assert isinstance(error, gt.TrainingError)
    assert str(error) == "rank 1 was interrupted"


@pytest.mark.parametrize(("kind", "rank"), [("_exit", 1), ("_exit", 0), ("exit", 1)])
def test_a_rank_that_leaves_early_is_named(tmp_path, kind, rank):
    error = fails(tmp_path, kind, rank)
    assert isinstance(error, gt.TrainingError)
    assert str(error).startswith(f"rank {rank} left the program before the run ended")


def test_a_stopped_rank_is_named_at_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "GRACE", 1.0)
    error = fails(tmp_path, "SIGSTOP", 1, strategy_options={"timeout": 5.0})
    assert isinstance(error, gt.TrainingError)
    assert str(error).startswith("rank 1 did not come to a collective within the strategy's timeout")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_at_the_timeout(tmp_path, rank):
    error = fails(tmp_path, "hang", rank, strategy_options={"timeout": 5.0})
    assert isinstance(error, gt.TrainingError)
    assert str(error).startswith(f"rank {rank} did not come to a collective within the strategy's timeout (hung or stopped): ")
    assert "timed out" in str(error).lower()
    assert {path.name for path in tmp_path.glob("teardown-*")} == {"teardown-0", "teardown-1"}


def test_a_rank_that_stays_stopped_ends_the_run_long_before_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "GRACE", 1.0)
    monkeypatch.setattr(stopped, "PATIENCE", 4.0)
    error = fails(tmp_path, "SIGSTOP", 1)
    assert isinstance(error, gt.TrainingError)
    assert str(error).startswith("rank 1 failed: it has been stopped (SIGSTOP)")
    assert (tmp_path / "teardown-0").exists()


def test_a_run_after_a_failed_one(tmp_path):
    fails(tmp_path, "SIGKILL", 1)
    module = Net()
    trainer(max_epochs=1).fit(module, loader())
    assert len(module.losses) == 6


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors through /proc")
def test_runs_leave_no_descriptor_and_no_file_in_memory(tmp_path):
    def opened():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    one, module = trainer(max_epochs=1), Net()
    one.fit(module, loader())  # the helper process's descriptors stay
    before = opened()
    one.fit(module, loader())
    predicted = one.predict(module, loader())
    fails(tmp_path, "exception", 1, error=KeyError("mine"))
    assert opened() == before
    with open("/proc/self/maps") as maps:
        assert "memfd:geartrain" not in maps.read()
    assert predicted


def test_logs_stay_after_a_failure_and_tell_why(tmp_path, capfd):
    error = fails(tmp_path, "exception", 1, error=KeyError("mine"), output=tmp_path / "out")
    assert isinstance(error, KeyError)
    assert "KeyError: 'mine'" in (tmp_path / "out" / "logs" / "rank-1.log").read_text()
    assert "--- the end of rank 1's output ---" in capfd.readouterr().err


# --- refused -------------------------------------------------------------------------------------------------------------


def test_unknown_start_method():
    with pytest.raises(gt.UsageError, match=r"geartrain-spawn\[ddp_spawn\]: start_method='thread' cannot be used here. Fix: forkserver"):
        trainer("thread")


def test_fork_after_cuda_was_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(gt.UsageError, match="start_method='fork' cannot be used once this process has used CUDA"):
        trainer("fork").fit(Net(), loader())


def test_in_a_process_that_a_launcher_started(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(gt.UsageError, match=r"this is one of 2 that torchrun has started\. Fix: --strategy ddp"):
        trainer().fit(Net(), loader())


def test_the_backend_s_error_names_this_strategy():
    with pytest.raises(gt.UsageError, match=r"geartrain-spawn\[ddp_spawn\]: process_group_backend='nccl' cannot be used on cpu"):
        trainer(strategy_options={"process_group_backend": "nccl"}).fit(Net(), loader())


def test_the_environment_of_the_caller_is_left_alone():
    before = dict(os.environ)
    trainer(max_epochs=1).fit(Net(), loader())
    assert {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} == {
        name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"
    }
