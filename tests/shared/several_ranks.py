"""Run functions on several ranks.

A function of a test's module runs on ranks that a server forks (rank_server.py). The server has
imported torch; each pytest process has one server. A test that needs ranks started by geartrain
runs a separate program.
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
from typing import Any, NoReturn

import pytest
import torch

from geartrain_parallel.sealed import SECRET
from geartrain_testing.launching import _CLEARED, Launched, launched

ROOT = Path(__file__).parents[2]


@dataclass
class Rank:
    """The end of a rank, and its results."""

    #: The exit code, -9 after SIGKILL; or words, if the server had to end the rank.
    end: str
    #: The function's return value; ``None`` after an error.
    result: Any
    #: The function's error, such as ``"KeyError: 'text'"``, or "".
    error: str
    #: Standard output, without the lines of torch 2.8's gloo, and standard error.
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
    """Call a function of a module on several ranks, in the folder; return the end of each.

    Args:
        arguments: the function's arguments; JSON must be able to carry them.
        place: ``"rank"``: each process is a rank; ``"node"``: each is the program of one node;
            ``"alone"``: each is a single process.
        seconds: the time after which the server ends the ranks.
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
            # As ranks have it that geartrain starts.
            "environment": _environment(**({SECRET: "of the test"} if place == "rank" else {})),
        }
    )
    return [_rank(folder, number, end) for number, end in enumerate(ends)]


def succeeded(
    folder: Path, function: Callable[..., Any], *arguments: Any, **options: Any
) -> list[Rank]:
    """Return the end of each rank; all must succeed. The options are those of :func:`run`."""
    found = run(folder, function, *arguments, **options)
    for number, rank in enumerate(found):
        assert rank.end == "0", f"{function.__name__} on rank {number}: {rank.end}\n{rank.printed}"
    return found


def results(
    folder: Path, function: Callable[..., Any], *arguments: Any, **options: Any
) -> list[Any]:
    """Return the function's result on each rank; all must succeed."""
    return [rank.result for rank in succeeded(folder, function, *arguments, **options)]


def failed(
    folder: Path, function: Callable[..., Any], *arguments: Any, **options: Any
) -> list[Rank]:
    """Return the end of each rank; all must fail with an error."""
    found = run(folder, function, *arguments, **options)
    for number, rank in enumerate(found):
        assert rank.end == "1", f"{function.__name__} on rank {number}: {rank.end}\n{rank.printed}"
    return found


def kept_by(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return a fixture of module scope with the function's result on each rank."""

    @pytest.fixture(scope="module")
    def kept(tmp_path_factory):
        return results(tmp_path_factory.mktemp(function.__name__), function, *arguments, **options)

    return kept


def command(folder: Path, *arguments: Any) -> Rank:
    """Run the ``geartrain`` command in a separate process and return its end."""
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
    """Start a program that calls the function on ranks that geartrain starts."""
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
    """Run the function as :func:`program` does and return each rank's result; it must succeed."""
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
    # One thread, because the server forks.
    return {**kept, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **more}


class _Server:
    """The process that forks ranks. It ends when this process ends."""

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
        """Send a request and return the answer.

        After a failure, such as a test's timeout, the next request gets a new server.
        """
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], 60 + request["seconds"])
            answer = self._process.stdout.readline() if ready else ""
            assert answer, f"the rank server has ended or does not answer: {self._process.poll()}"
        except BaseException:
            _server.cache_clear()
            self._process.kill()
            raise
        found: list[str] | str = json.loads(answer)
        assert isinstance(found, list), found
        return found


_server = cache(_Server)
