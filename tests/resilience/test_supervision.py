"""The process that runs a command again. The commands here are small programs without torch."""

import json
import os
import signal
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import pytest

from geartrain_resilience.exchange import Attempt, Report
from geartrain_resilience.processes import children
from geartrain_resilience.supervision import Supervisor

BEGIN = """
import json, os, signal, subprocess, sys, time
from geartrain_resilience.exchange import Attempt, Report, Steps
attempt = Attempt.current()
with open("started", "a") as file:
    file.write(f"{os.getpid()}\\n")
if attempt.turn is not None and os.path.exists("broken"):
    sys.exit(3)
attempt.wait_for_turn()
attempt = Attempt.current()
with open("attempts", "a") as file:
    file.write(json.dumps([attempt.options, attempt.failure]) + "\\n")
def done(*steps):
    for rank, step in enumerate(steps):
        Steps(attempt.folder).write(rank, step)
def waiting():
    # until the next process has started; return its id
    while len(pids := open("started").read().split()) < 2:
        time.sleep(0.01)
    return pids[1]
def fails(error, ranks=2):
    Report.of(error, ranks).write(attempt.folder)
    sys.exit(1)
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """``supervise("fails(ValueError())", limit=2)``: return the code and the attempts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("geartrain_resilience.supervision.START_DIRECTORY", str(tmp_path))

    def run(program, limit=3, ranks=2, max_steps=-1, stdout=None, arguments=()):
        command = [sys.executable, "-c", BEGIN + program, *arguments]
        supervisor = Supervisor(command, limit, tmp_path, ranks, max_steps, {}, stdout)
        code = supervisor.run()
        supervisor.print_result()
        return code, [json.loads(line) for line in Path("attempts").read_text().splitlines()]

    return run


@pytest.mark.parametrize("code", [0, 2, 75])
def test_a_run_that_is_done_wrong_usage_and_preemption_are_not_started_again(supervise, code):
    ended, attempts = supervise(f"sys.exit({code})")
    assert (ended, len(attempts)) == (code, 1)


def test_a_killed_run_goes_on_from_its_last_checkpoint(supervise, tmp_path, capfd):
    code, attempts = supervise(
        "done(6, 6)\nif attempt.number < 2: os.kill(os.getpid(), signal.SIGKILL)"
    )
    failure = "rank 0 was ended by SIGKILL in step 7"
    first, resumed = {"output": str(tmp_path)}, {"output": str(tmp_path), "resume": "auto"}
    assert (code, attempts) == (0, [[first, ""], [resumed, failure], [resumed, failure]])
    assert capfd.readouterr().err == ""  # the run, not the supervisor, prints from where it resumes


KILLED_LATER = """
done(6, 6)
if attempt.number == 0:
    waiting()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_process_waits_while_the_run_trains(supervise, tmp_path):
    code, attempts = supervise(KILLED_LATER, limit=1)
    assert (code, len(attempts)) == (0, 2)
    assert attempts[1][1] == "rank 0 was ended by SIGKILL in step 7"
    assert len(Path("started").read_text().split()) == 2


@pytest.mark.parametrize("name", ["imported_by_test.py", "config.yaml"])
def test_a_process_that_has_read_a_file_before_an_edit_is_replaced(supervise, monkeypatch, name):
    Path("imported_by_test.py").touch()
    Path("config.yaml").touch()
    monkeypatch.syspath_prepend(".")
    monkeypatch.setitem(sys.modules, "imported_by_test", import_module("imported_by_test"))
    edit = f"waiting()\n    open({name!r}, 'a').write('edited = True')"
    program = KILLED_LATER.replace("waiting()", edit)
    code, attempts = supervise(program, limit=1, arguments=["--config=config.yaml"])
    assert (code, len(attempts)) == (0, 2)
    assert len(Path("started").read_text().split()) == 3


def test_a_process_that_waits_for_nothing_is_ended(supervise):
    code, attempts = supervise("done(6, 6)\nwaiting()")
    assert (code, len(attempts)) == (0, 1)
    _, pid = map(int, Path("started").read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_fails_while_it_waits_is_replaced(supervise):
    Path("broken").touch()
    ended = 'while " Z " not in open(f"/proc/{pid}/stat").read(): time.sleep(0.01)'
    program = KILLED_LATER.replace("waiting()", f"pid = waiting()\n    {ended}")
    code, attempts = supervise(program, limit=1)
    assert (code, len(attempts)) == (0, 2)
    assert len(Path("started").read_text().split()) == 3


def test_after_the_last_restart_the_run_has_failed(supervise, capfd):
    ends = ("os._exit(7)", "os.kill(os.getpid(), 40)", "os._exit(7)")
    program = f"done(attempt.number, 0)\nexec({ends}[attempt.number])"
    code, attempts = supervise(program, limit=2)
    assert (code, len(attempts)) == (1, 3)
    assert attempts[2][1] == "rank 0 was ended by signal 40 in step 2"
    assert "rank 0 ended with exit code 7 in step 3. The run ends: it was started again 2" in (
        capfd.readouterr().err
    )


def test_the_same_error_in_the_same_step_is_tried_once_more(supervise, capfd):
    code, attempts = supervise("done(4, 4)\nfails(ValueError('bad batch'))", limit=9)
    assert (code, len(attempts)) == (1, 2)
    assert (
        "rank 0 failed: ValueError: bad batch in step 5, for the second time: the same failure in "
        "the same step does not go away by more restarts" in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    "program",
    [
        "done(attempt.number, 0)\nfails(ValueError('bad batch'))",
        "done(4, 4)\nfails(ValueError(f'bad batch {chr(65 + attempt.number)}'))",
    ],
)
def test_another_step_or_another_error_is_no_repetition(supervise, program):
    assert len(supervise(program, limit=3)[1]) == 4


def test_an_error_that_differs_in_an_address_is_a_repetition(supervise):
    program = "done(4, 4)\nfails(ValueError(f'<object at {hex(os.getpid())}>'))"
    assert len(supervise(program, limit=9)[1]) == 2


def test_a_run_that_has_done_its_steps_is_not_started_again(supervise, capfd):
    code, attempts = supervise("done(8, 8)\nfails(OSError('after training'))", max_steps=8)
    assert (code, len(attempts)) == (1, 1)
    assert "training was over" in capfd.readouterr().err


def test_ctrl_c_in_the_run_ends_it(supervise):
    assert len(supervise("done(1, 1)\nfails(KeyboardInterrupt())")[1]) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_the_run_is_not_started_again(supervise, number):
    def send():
        while not Path("ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    code, attempts = supervise(
        f"signal.signal({int(number)}, lambda number, frame: sys.exit(number))\n"
        "open('ready', 'w').close()\ntime.sleep(30)"
    )
    sender.join()
    assert (code, len(attempts)) == (2 if number == 2 else 1, 1)


def test_nothing_of_a_failed_run_is_left(supervise):
    program = (
        "if attempt.number: sys.exit(0)\n"
        "inner = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)'\n"
        "other = subprocess.Popen([sys.executable, '-c', inner], start_new_session=True)\n"
        "open('pid', 'w').write(str(other.pid))\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    before = children()
    code, attempts = supervise(program)
    assert (code, len(attempts)) == (0, 2)
    assert children() == before
    assert not Path("/proc", Path("pid").read_text()).exists()


def test_a_run_that_is_stopped_is_started_again(supervise, monkeypatch, capfd):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "stopped=0.5")
    code, attempts = supervise(
        "if attempt.number < 1:\n    done(3, 3)\n    os.kill(os.getpid(), signal.SIGSTOP)"
    )
    assert (code, len(attempts)) == (0, 2)
    assert attempts[1][1] == "rank 0 was stopped (SIGSTOP) in step 4"


def test_json_is_that_of_the_last_attempt(supervise, tmp_path):
    with (tmp_path / "out").open("wb") as out:
        supervise(
            "print(attempt.number, flush=True)\nos._exit(attempt.number == 0)",
            3,
            2,
            -1,
            out.fileno(),
        )
    assert (tmp_path / "out").read_text() == "1\n"


@pytest.mark.parametrize(
    ("error", "note", "text", "rank"),
    [
        (ValueError("bad"), "", "ValueError: bad", 0),
        (ValueError("bad"), "raised on rank 1", "ValueError: bad", 1),
        (RuntimeError("rank 1 was ended by SIGSEGV\nmore"), "", "rank 1 was ended by SIGSEGV", 1),
    ],
)
def test_the_rank_of_an_error(error, note, text, rank):
    if note:
        error.add_note(note)
    report = Report.of(error, ranks=2)
    assert (report.error, report.rank) == (text, rank)


def test_a_program_of_the_run_is_no_attempt(monkeypatch):
    attempt = Attempt(sys.orig_argv[1:], {}, "folder", 1)
    monkeypatch.setenv("GEARTRAIN_ATTEMPT", attempt.variable()["GEARTRAIN_ATTEMPT"])
    assert Attempt.current() == attempt
    monkeypatch.setattr(sys, "orig_argv", ["python", "other.py"])
    assert Attempt.current() is None
