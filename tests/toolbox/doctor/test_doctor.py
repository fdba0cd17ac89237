"""``geartrain doctor`` as a whole: its output, exit code and leftovers."""

import json
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

from geartrain_testing.launching import HAS_PROC, LOOPBACK, launched, listening, until
from geartrain_tools.doctor import all_reduce_check, processes as doctor_processes
from geartrain_tools.doctor.findings import examine
from geartrain_tools.doctor.network import LAUNCHER

SECTIONS = {
    "versions",
    "accelerators",
    "plugins",
    "all_reduce",
    "network",
    "machine",
    "environment",
}
needs_proc = pytest.mark.skipif(not HAS_PROC, reason="looks for processes and ports in /proc")
GIB = 2**30


@pytest.fixture(autouse=True)
def healthy(monkeypatch):
    """Simulate free disk space and an empty environment, which the machine may not have."""
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: SimpleNamespace(total=100 * GIB, used=50 * GIB, free=50 * GIB),
    )
    real = os.statvfs
    roomy = SimpleNamespace(f_blocks=8 * GIB // 4096, f_bavail=8 * GIB // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: roomy if path == "/dev/shm" else real(path))
    for name in (*LAUNCHER, "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def doctor(command):
    """``doctor("--accelerator cpu")``: return the exit code and the output of ``--json``."""

    def run(options=""):
        done = command(f"doctor --json {options}")
        return done.code, json.loads(done.out)

    return run


@pytest.fixture
def torch_in_children(folder, monkeypatch):
    """``torch_in_children(source)``: only child processes import this in place of torch."""

    def replace(source):
        home = folder / "in_children"
        home.mkdir()
        (home / "torch.py").write_text(
            f"import os, signal, time\nfirst = os.environ['RANK'] == '0'\n{source}\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(home), prepend=os.pathsep)

    return replace


# --- nothing to fix -------------------------------------------------------------------------------


@pytest.mark.usefixtures("known_all_reduce")
def test_nothing_to_fix(command):
    done = command("doctor")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "nothing to fix"
    for shown in (
        torch.__version__,
        "exact; 4 MiB in",
        "is free and answers",
        "selected",
        "/dev/shm",
    ):
        assert shown in done.out
    assert not torch.cuda.is_initialized()


@pytest.mark.usefixtures("known_all_reduce")
def test_json_has_everything_and_nothing_else_is_on_stdout(doctor, install):
    source = "print('printed at import')\nclass A:\n    pass\n"
    install("geartrain-loud", source, plugins={"loud": "A"})
    code, facts = doctor()
    assert code == 0
    assert set(facts) == {*SECTIONS, "failed", "problems", "warnings"}
    assert facts["problems"] == []
    assert facts["failed"] == {}
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["distributions"]["geartrain-loud"] == "1.0"
    assert facts["accelerators"]["chosen"]["name"] == "cpu"
    states = {row["name"]: row["state"] for row in facts["plugins"]["plugins"]}
    assert states.keys() > {"single", "loud", "csv"}  # core's plugins are included
    assert set(states.values()) == {"available"}
    assert facts["all_reduce"]["backend"] == "gloo"
    assert facts["all_reduce"]["error"] is None
    assert 0 < facts["all_reduce"]["all_reduce_ms"] < facts["all_reduce"]["seconds"] * 1000


# --- no leftovers ---------------------------------------------------------------------------------

DOCTOR = "import sys; from geartrain.commands import main; sys.exit(main(['doctor', '--json']))"


@needs_proc
@pytest.mark.end_to_end
def test_it_leaves_nothing_and_listens_on_loopback_alone(folder):
    with launched("-c", DOCTOR, folder=folder) as run:
        until(lambda: len(run.processes()) >= 3, 60, "the two processes are started")
        heard = set()

        def ended():
            heard.update(listening(run.processes()))
            return run.process.poll() is not None

        until(ended, 60, "the doctor ends")
        facts = json.loads(run.out)
        assert facts["all_reduce"]["error"] is None
        assert heard
        assert heard <= set(LOOPBACK)
        assert run.left_behind() == []


@needs_proc
@pytest.mark.end_to_end
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_leaves_nothing_when_it_is_ended(folder, number):
    with launched("-c", DOCTOR, folder=folder) as run:
        until(lambda: len(run.processes()) >= 3, 60, "the two processes are started")
        run.process.send_signal(number)
        assert run.wait() == 1
        assert "Traceback" not in run.err
        assert run.left_behind() == []


# --- two processes --------------------------------------------------------------------------------


def test_the_two_processes_import_no_file_of_the_current_folder_and_leave_nothing(all_reduced):
    """The fixture's folder has a random.py that exits."""
    assert all_reduced.facts["error"] is None
    assert all_reduced.after == all_reduced.before


def test_an_interface_that_does_not_exist_is_named_with_the_fix(
    doctor, monkeypatch, torch_in_children
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent")
    torch_in_children("raise RuntimeError('Unable to find address for: nonexistent')")
    _, facts = doctor()
    (problem,) = facts["problems"]
    assert (problem["check"], "gloo" in problem["what"]) == ("all_reduce", True)
    assert "unset GLOO_SOCKET_IFNAME" in problem["fix"]


@pytest.mark.end_to_end
def test_gloos_own_error_names_the_interface(doctor, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent")
    code, facts = doctor()
    assert code == 1
    assert "nonexistent" in facts["all_reduce"]["error"]
    assert any(
        "init_process_group" in (rank["error"] or "") for rank in facts["all_reduce"]["ranks"]
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "if not first: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)",
            "rank 1 was ended by SIGKILL",
        ),
        ("if not first: os._exit(7)\ntime.sleep(600)", "rank 1 ended with exit code 7"),
        (
            "if first: raise OSError('no such driver')\ntime.sleep(600)",
            "rank 0 failed: OSError: no such driver",
        ),
        # Rank 0 fails first, but only because it lost its peer, so it is not blamed.
        (
            "raise RuntimeError('Connection closed by peer' if first else 'out of memory')",
            "rank 1 failed: RuntimeError: out of memory",
        ),
    ],
)
def test_a_process_that_dies_is_named(torch_in_children, monkeypatch, source, said):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "unwind=0.5")
    torch_in_children(source)
    facts = all_reduce_check.all_reduce("gloo", "cpu")
    assert facts["error"] == said
    assert facts["all_reduce_ms"] is None
    assert [rank["rank"] for rank in facts["ranks"] if rank["blamed"]] == [int(said.split()[1])]


def test_processes_that_hang_are_stopped_and_show_their_stacks(
    torch_in_children, monkeypatch, doctor, command
):
    monkeypatch.setattr(all_reduce_check, "DEADLINE", 3.0)
    torch_in_children("def where_it_hangs():\n    time.sleep(600)\nwhere_it_hangs()")
    done = command("doctor")
    assert done.code == 1
    frame = "it is in where_it_hangs, torch.py:4"
    assert f"rank 0 did not end within 3 s: {frame}; rank 1 did not" in done.out
    # Both stacks are shown.
    assert done.out.count("in where_it_hangs\n") + done.out.count("in where_it_hangs ") >= 2


def test_a_wrong_sum_is_an_error(folder, monkeypatch):
    """Real torch, but all_reduce leaves one number of each vector unsummed."""
    home = folder / "in_children"
    home.mkdir()
    (home / "geartrain_wrong_sum.py").write_text(
        "import sys, runpy, torch.distributed as dist\n"
        "real = dist.all_reduce\n"
        "def forgets(tensor):\n"
        "    before = tensor[5].item()\n"
        "    real(tensor)\n"
        "    tensor[5] = before\n"
        "dist.all_reduce = forgets\n"
        "from geartrain_tools.doctor import all_reduce_check\n"
        "all_reduce_check.main(sys.argv[1:])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(home), prepend=os.pathsep)
    monkeypatch.setattr(all_reduce_check, "__name__", "geartrain_wrong_sum")
    facts = all_reduce_check.all_reduce("gloo", "cpu")
    assert facts["error"].endswith(
        f"the all-reduce gave 1 wrong numbers of {all_reduce_check.NUMBERS}"
    )


@pytest.mark.parametrize("name", ["nope", "fake"])
def test_a_backend_that_torch_does_not_have_is_wrong_usage(refused, name):
    assert "Fix: gloo" in refused(f"doctor --backend {name}")


@pytest.mark.usefixtures("known_all_reduce")
def test_backend_by_name(doctor):
    _, facts = doctor("--backend gloo")
    assert facts["all_reduce"]["why"] == "--backend gloo"
    assert facts["all_reduce"]["error"] is None


def test_on_windows_the_all_reduce_is_skipped_without_a_problem(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    section = examine("all_reduce", doctor_processes.processes, None, None, None)
    assert section.facts == {"backend": None, "why": "not tried on Windows", "error": None}
    assert section.findings == []


# --- checks are independent -----------------------------------------------------------------------


@pytest.mark.usefixtures("known_all_reduce")
def test_a_check_that_fails_is_a_problem_and_the_others_continue(doctor, monkeypatch, command):
    def broken(path):
        raise PermissionError("no disk for you")

    monkeypatch.setattr(shutil, "disk_usage", broken)
    code, facts = doctor()
    assert code == 1
    assert facts["failed"] == {"machine": "PermissionError: no disk for you"}
    assert [problem["check"] for problem in facts["problems"]] == ["machine"]
    assert facts["all_reduce"]["error"] is None
    assert facts["network"]["loopback"]["error"] is None
    shown = command("doctor")
    assert "machine\n  this check failed: PermissionError: no disk for you" in shown.out
    assert shown.out.splitlines()[0] == "1 thing must be fixed"
    assert shown.err == "geartrain doctor: 1 thing must be fixed\n"


_again = pytest.mark.matrix


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--backend", "gloo"), marks=_again),
        pytest.param(("--backend", "nope"), marks=_again),
    ],
)
def test_a_missing_torch_is_one_problem_and_the_checks_continue(python, write, options):
    write(
        "doctor.py",
        "import sys\nsys.modules['torch'] = None\n"
        "from geartrain.commands import main\nsys.exit(main(sys.argv[1:]))\n",
    )
    done = python("doctor.py", "doctor", "--json", *options)
    assert done.returncode == 1, done.stderr
    facts = json.loads(done.stdout)
    about_torch = [problem for problem in facts["problems"] if "torch" in problem["what"]]
    assert [problem["what"] for problem in about_torch] == ["torch is not installed"]
    assert about_torch[0]["fix"].startswith("pip install torch")
    assert facts["network"]["loopback"]["error"] is None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=_again),
        pytest.param(("--backend", "gloo"), marks=_again),
        ("--pickle", "net.py"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_problem_and_checks_continue(python, write, options):
    write(
        "broken/torch/__init__.py",
        "raise OSError('libcudart.so.12: cannot open shared object file')\n",
    )
    write(
        "doctor.py",
        "import sys\nsys.path.insert(0, 'broken')\n"
        "from geartrain.commands import main\nsys.exit(main(sys.argv[1:]))\n",
    )
    done = python("doctor.py", "doctor", "--json", *options)
    assert done.returncode == 1, done.stderr
    facts = json.loads(done.stdout)
    assert "libcudart.so.12" in facts["failed"]["versions"]
    assert ("pickle" in facts["failed"]) is ("--pickle" in options)
    assert any("libcudart.so.12" in problem["what"] for problem in facts["problems"])
    assert facts["network"]["loopback"]["error"] is None
    shown = python("doctor.py", "doctor", *options)
    assert shown.returncode == 1
    assert "libcudart.so.12" in shown.stdout
    assert "Traceback" not in shown.stderr


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--js", "--json"),
        ("--acelerator cpu", "--accelerator"),
        ("--accelerator", "expected one argument"),
        ("--accelerator cpuu", "'cpu'"),
        ("net.py", "net.py"),
        ("--model.hidden 3", "--pickle"),
        ("--pickle net.py --model.hidden 3 4", "there is no option 4"),
        ("--pickle net.py --model.hiden 3", "model.hidden"),
        ("--pickle none.py", "there is no file none.py"),
    ],
)
def test_wrong_usage(refused, words, expected):
    assert expected in refused(f"doctor {words}")


def test_help(command):
    done = command("doctor --help")
    assert done.code == 0
    for option in ("--json", "--accelerator", "--backend", "--pickle"):
        assert option in done.out
    assert "doctor" in command("--help").out
