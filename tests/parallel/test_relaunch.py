"""The command of other ranks: the same program from its start directory, or an error."""

import os
import subprocess
import sys

import pytest

from geartrain import UsageError
from geartrain_parallel import rerun_command as relaunch

#: Runs its command again, or prints "again" if it is run again.
ASK = """
import os, subprocess, sys
from geartrain_parallel import rerun_command as relaunch
if "AGAIN" in os.environ:
    print("again", sys.argv[1:], flush=True)
else:
    os.chdir(os.sep)
    try:
        command, environ = relaunch.command(), {**os.environ, "AGAIN": "1"}
        done = subprocess.run(command, cwd=relaunch.START_DIRECTORY, env=environ)
        sys.exit(done.returncode)
    except relaunch.UsageError as error:
        print("refused:", error, flush=True)
"""
THREAD = f"""
import threading
thread = threading.Thread(target=exec, args=({ASK!r}, {{}}))
thread.start()
thread.join()
"""
SESSION = """\
from geartrain_parallel import rerun_command as relaunch
try: relaunch.command()
except Exception as error: print("refused:", error)

"""


def python(*arguments, folder, stdin=""):
    environ = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTEST_CURRENT_TEST", "AGAIN")
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environ,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(ASK)
    (tmp_path / "threaded.py").write_text(THREAD)
    (tmp_path / "wrapper.py").write_text(
        "import runpy\nrunpy.run_path('program.py', run_name='__main__')\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(ASK)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("program.py", "-x", "one two"),
        ("./program.py", "-c"),
        ("-c", ASK, "--", "x"),
        ("-Bc", ASK),
        ("-W", "ignore", "-m", "package", "x"),
        ("package", "x"),
        ("wrapper.py", "x"),
    ],
    ids=["script", "its own -c", "-c", "-Bc", "-m", "folder", "wrapper"],
)
def test_runs_the_same_command_again_in_the_start_directory(folder, arguments):
    expected = list(arguments[{"-W": 4, "-c": 2, "-Bc": 2}.get(arguments[0], 1) :])
    assert f"again {expected}" in python(*arguments, folder=folder)


@pytest.mark.parametrize(
    ("arguments", "stdin", "reason"),
    [
        (("-",), ASK, "standard input"),
        ((), ASK, "standard input"),
        (("-", "-c"), ASK, "standard input"),
        (("/dev/stdin",), ASK, "standard input"),
        (("-i", "program.py"), "", "interactive"),
        (("-i",), SESSION, "interactive"),
        (("threaded.py",), "", "thread"),
    ],
    ids=["-", "nothing", "- -c", "a device", "-i program", "-i", "thread"],
)
def test_refuses_a_program_that_cannot_be_run_again(folder, arguments, stdin, reason):
    said = python(*arguments, folder=folder, stdin=stdin)
    assert "refused: " in said
    assert reason in said
    assert "--strategy ddp_spawn" in said
    assert "--strategy dp (pip install geartrain-dp)" in said
    assert "again" not in said.replace("the same command again", "").replace("run again", "")


def test_refuses_under_pytest():
    with pytest.raises(UsageError, match=r"under pytest.*ddp_spawn"):
        relaunch.command()


def test_a_program_that_a_test_starts_is_not_refused(folder, monkeypatch):
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "x")
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert "again []" in done.stdout


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        ("import geartrain", "os.chdir(os.sep)", "again ['x']"),
        ("os.chdir(os.sep)", "import geartrain", "import geartrain before os.chdir()"),
    ],
)
def test_a_program_may_change_its_directory_after_importing_geartrain(folder, first, then, says):
    (folder / "moves.py").write_text(
        f"import os\nif 'AGAIN' not in os.environ:\n    {first}\n    {then}\n{ASK}"
    )
    assert says in python("moves.py", "x", folder=folder)
