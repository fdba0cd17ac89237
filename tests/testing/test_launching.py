"""Programs that the kit starts: output, processes, leftovers, ports."""

import itertools
import socket
import sys
from pathlib import Path

import pytest

from geartrain_testing import launching
from geartrain_testing.launching import (
    HAS_PROC,
    PORTS,
    Launched,
    free_port,
    launched,
    listening,
    until,
)

pytestmark = pytest.mark.skipif(not HAS_PROC, reason="finds processes through /proc")

CHILD = """
import subprocess, sys
program = "import threading; threading.Event().wait()"
subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
"""
FILE = "import os, tempfile; os.close(tempfile.mkstemp(prefix='left-')[0])"
LISTENS = """
import pathlib, socket, threading
listener = socket.create_server(("127.0.0.1", 0))
pathlib.Path("listening").touch()
threading.Event().wait()
"""


def test_a_program_without_leftovers_has_an_empty_list(tmp_path):
    with launched("-c", "print('hello')", folder=tmp_path) as run:
        assert run.succeed().out == "hello\n"
        assert run.left_behind() == []
        assert run.processes() == []


def test_a_process_in_another_session_is_found_and_ended(tmp_path):
    with launched("-c", CHILD, folder=tmp_path) as run:
        run.succeed()
        (left,) = run.left_behind(0.5)
        assert "threading.Event().wait()" in left
    assert run.processes() == []


def test_a_temporary_file_is_found(tmp_path):
    with launched("-c", FILE, folder=tmp_path) as run:
        run.succeed()
        (left,) = run.left_behind(0.1)
        assert left.startswith("temporary file left-")


MAPS = """
import pathlib, sys, threading
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=8)
resource_tracker.unregister(memory._name, "shared_memory")  # so that it stays
print(memory.name, flush=True)
sys.stdin.read()
threading.Event().wait()
"""


def test_shared_memory_of_a_killed_process_is_found_and_that_of_other_programs_is_not(tmp_path):
    with launched("-c", MAPS, folder=tmp_path) as run:
        name = until(lambda: run.out.strip(), 30, "shared memory")
        mine, foreign = Path("/dev/shm", name), Path("/dev/shm/of-another-program")
        try:
            foreign.touch()
            until(lambda: str(mine) in run._mapped, 30, "it was seen")
            run.process.kill()
            run.process.wait(10)
            until(lambda: not run.processes(), 30, "multiprocessing's own process has ended")
            assert run.left_behind(0.1) == [f"shared memory {mine}"]
        finally:
            mine.unlink(missing_ok=True)
            foreign.unlink(missing_ok=True)


def test_a_path_of_temporary_files_is_short_enough_for_sockets(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    program = (
        "import socket, tempfile; "
        "socket.socket(socket.AF_UNIX).bind(tempfile.mkdtemp() + '/' + 'y' * 40)"
    )
    with launched("-c", program, folder=folder) as run:
        run.succeed()


def test_variables_of_ranks_do_not_reach_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with launched(
        "-c", "import os; print('RANK' in os.environ, 'WORLD_SIZE' in os.environ)", folder=tmp_path
    ) as run:
        assert run.succeed().out == "False False\n"


def test_listening_addresses_are_hexadecimal(tmp_path):
    with launched("-c", LISTENS, folder=tmp_path) as run:
        until((tmp_path / "listening").exists, 30, "it listens")
        assert listening(run.processes()) == ["0100007F"]


def test_the_output_of_a_program_that_does_not_end_is_shown(tmp_path):
    run = Launched(
        [sys.executable, "-c", "print('before'); import threading; threading.Event().wait()"],
        tmp_path,
    )
    try:
        until(lambda: run.out, 30, "output")
        with pytest.raises(AssertionError, match=r"still running after 0.1 s\nbefore"):
            run.wait(0.1)
    finally:
        run.kill()


def test_until_names_the_condition_that_did_not_hold():
    with pytest.raises(AssertionError, match=r"not within 0.05 s: the moon"):
        until(lambda: False, 0.05, "the moon")


def test_free_ports_are_different_and_outside_the_kernels_range():
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert set(ports) <= set(PORTS)
    assigned = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if assigned.exists():
        assert max(PORTS) < int(assigned.read_text().split()[0])


def test_a_port_with_a_listener_is_not_free(monkeypatch):
    with socket.socket() as taken:
        first = free_port()
        taken.bind(("127.0.0.1", first))
        taken.listen()
        monkeypatch.setattr(launching, "_numbers", itertools.count(PORTS.index(first)))
        assert free_port() > first
