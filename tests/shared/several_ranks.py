"""Run functions and scripts on several ranks.

A function of a test's module runs on ranks that a server forks (rank_server.py), which has imported torch already; each pytest process has
one server. Whatever needs ranks that geartrain itself has started is a script, a program of its own.
"""

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from geartrain_testing.launching import _CLEARED, Launched, launched

ROOT = Path(__file__).parents[2]


@dataclass
class Rank:
    """How a rank ended."""

    #: Its exit status, -9 after SIGKILL; or words, if it had to be ended.
    end: str
    #: What the function returned; ``None`` after an error.
    result: Any
    #: What it raised, ``"KeyError: 'text'"``; "" if nothing.
    error: str
    #: What it wrote to its standard output, without the lines of torch 2.8's gloo, and to its standard error.
    out: str
    err: str

    @property
    def printed(self) -> str:
        return self.out + self.err


def run(
    folder: Path,
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 2,
    place: str = "rank",
    seconds: float = 60,
) -> list[Rank]:
    """Call a function of a module on several ranks, in the folder; what came of each.

    Args:
        arguments: what JSON can carry.
        place: ``"rank"``: each is a rank; ``"node"``: each is the program of one of so many nodes; ``"alone"``: none knows of the others.
        seconds: after which ranks are ended.
    """
    for earlier in folder.glob("rank-*.*"):
        earlier.unlink()
    ends = _server().ask(
        {
            "module": _module(function),
            "function": function.__name__,
            "arguments": arguments,
            "ranks": ranks,
            "place": place,
            "folder": str(folder),
            "seconds": seconds,
            "environment": _environment(),
        }
    )
    return [_rank(folder, number, end) for number, end in enumerate(ends)]


def succeeded(
    folder: Path, function: Callable[..., Any], *arguments: Any, **options: Any
) -> list[Rank]:
    """How each rank ended, none of which may fail. The options are those of :func:`run`."""
    found = run(folder, function, *arguments, **options)
    for number, rank in enumerate(found):
        assert rank.end == "0", f"{function.__name__} on rank {number}: {rank.end}\n{rank.printed}"
    return found


def results(
    folder: Path, function: Callable[..., Any], *arguments: Any, **options: Any
) -> list[Any]:
    """What the function returned on each rank, none of which may fail."""
    return [rank.result for rank in succeeded(folder, function, *arguments, **options)]


def failed(
    folder: Path, function: Callable[..., Any], *arguments: Any, **options: Any
) -> list[Rank]:
    """How each rank ended, all of which must fail by themselves."""
    found = run(folder, function, *arguments, **options)
    for number, rank in enumerate(found):
        assert rank.end == "1", f"{function.__name__} on rank {number}: {rank.end}\n{rank.printed}"
    return found


def kept_by(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A fixture: what the function returned on each rank. It runs once for the tests of a module, if one of them is selected."""

    @pytest.fixture(scope="module")
    def kept(tmp_path_factory):
        return results(tmp_path_factory.mktemp(function.__name__), function, *arguments, **options)

    return kept


def command(folder: Path, *arguments: Any) -> Rank:
    """How the ``geartrain`` command ended, in a process of its own."""
    (process,) = run(folder, _command, *map(str, arguments), ranks=1, place="alone")
    return process


def _command(*arguments: str) -> NoReturn:
    from geartrain.commands import main

    sys.argv = ["geartrain", *arguments]
    sys.exit(main())


@contextmanager
def program(
    folder: Path, function: Callable[..., Any], *arguments: Any, **environment: str
) -> Iterator[Launched]:
    """A program of its own that calls the function, on ranks that geartrain starts."""
    file = Path(__file__).with_name("rank_program.py")
    with launched(
        str(file),
        _module(function),
        function.__name__,
        json.dumps(arguments),
        folder=folder,
        **environment,
    ) as run:
        yield run


def program_results(
    folder: Path,
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 2,
    seconds: float = 100,
) -> list[Any]:
    """What the function returned on each rank of a program of its own, which must succeed."""
    with program(folder, function, *arguments) as run:
        run.succeed(seconds)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]


def _module(function: Callable[..., Any]) -> str:
    return ".".join(Path(function.__code__.co_filename).relative_to(ROOT).with_suffix("").parts)


def _rank(folder: Path, number: int, end: str) -> Rank:
    result, error = (folder / f"rank-{number}.{what}" for what in ("pt", "error"))
    out, err = (
        (folder / f"rank-{number}.{what}").read_text(errors="replace") for what in ("out", "err")
    )
    return Rank(
        end,
        torch.load(result, weights_only=False) if result.exists() else None,
        error.read_text() if error.exists() else "",
        re.sub(r"^\[Gloo\] Rank .*\n", "", out, flags=re.MULTILINE),
        err,
    )


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    return {
        **kept,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }  # one thread: the server forks


class _Server:
    """The process that forks ranks; it ends with this one."""

    def __init__(self) -> None:
        paths = os.pathsep.join(
            [str(ROOT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(PYTHONPATH=paths),
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> list[str]:
        """Have a request done. After a failure, such as a test's own timeout, the next request has a new server."""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], 60 + request["seconds"])
            answer = self._process.stdout.readline() if ready else ""
            assert answer, (
                f"the server of ranks has ended or does not answer: {self._process.poll()}"
            )
        except BaseException:
            _server.cache_clear()
            self._process.kill()
            raise
        found: list[str] | str = json.loads(answer)
        assert isinstance(found, list), found
        return found


_server = cache(_Server)


PREAMBLE = """
import os
import sys
sys.path.insert(0, {here!r})
import torch
from torch import nn
from torch.utils.data import DataLoader
import geartrain as gt
from geartrain import hookimpl
from cases import *


def keep(trainer, **values):
    torch.save(values, f"kept-{{trainer.global_rank}}.pt")

"""


class Scripts:
    """Scripts that begin with the names of a folder's cases.py, and with ``keep(trainer, **values)``.

    Args:
        file: a module of the folder.
        more: lines at a script's beginning.
    """

    def __init__(self, file, more=""):
        self.preamble = PREAMBLE.format(here=str(Path(file).parent)) + more

    def script(self, folder, body, *arguments, timeout=100, **environment):
        """Run ``body`` after the preamble as train.py; what it printed and its exit status. Nothing outlives it."""
        (folder / "train.py").write_text(self.preamble + body, encoding="utf-8")
        with launched("train.py", *arguments, folder=folder, **environment) as run:
            return SimpleNamespace(returncode=run.wait(timeout), printed=run.out + run.err)

    def results(self, folder, body, ranks=2, timeout=100):
        """What each rank kept of a script that must succeed."""
        done = self.script(folder, body, timeout=timeout)
        assert done.returncode == 0, done.printed
        return [torch.load(folder / f"kept-{rank}.pt", weights_only=False) for rank in range(ranks)]

    def failure(self, folder, body, timeout=100):
        """What a script printed that must fail, by itself and within the time."""
        done = self.script(folder, body, timeout=timeout)
        assert done.returncode != 0, done.printed
        return done.printed
