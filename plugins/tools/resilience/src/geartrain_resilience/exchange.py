"""Messages between the supervisor and a run: an environment variable, a pipe, and files."""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from geartrain.plugin_api import detect

#: The environment variable with an :class:`Attempt`, which ranks inherit.
VARIABLE = "GEARTRAIN_ATTEMPT"
#: Bytes of one rank's step.
_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run. The command line reads ``options`` in place of those that were typed."""

    #: The arguments of the program: a program that the run starts has others, and is no attempt.
    argv: Sequence[str]
    #: Options of the command line, by name: the run's folder, and from where it resumes.
    options: dict[str, str]
    #: The folder of the files below.
    folder: str
    #: The process id of the supervisor.
    supervisor: int
    #: 0 for the first start.
    number: int = 0
    limit: int = 0
    #: The failure of the attempt before, as a sentence's subject and verb.
    failure: str = ""
    #: The lines of each file of metrics before the first attempt.
    lines: Mapping[str, int] = field(default_factory=dict)
    #: Of a process that waits for its turn: the descriptor from which it then reads its attempt.
    turn: int | None = None

    @classmethod
    def current(cls) -> Attempt | None:
        """Return this process's attempt; ``None`` if no supervisor has started it."""
        text = os.environ.get(VARIABLE)
        if text is None:
            return None
        attempt, place = cls(**json.loads(text)), detect()
        # A rank that was started on a function has another command.
        is_rank = place is not None and place.launcher == "geartrain"
        return attempt if is_rank or list(attempt.argv) == sys.orig_argv[1:] else None

    def variable(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    def wait_for_turn(self) -> None:
        """Wait until the attempt before has failed, if this process was started before.

        Raises:
            SystemExit: the supervisor has ended, or needs this process no more.
        """
        if self.turn is None:
            return
        with open(self.turn, "rb") as pipe:
            text = pipe.read()
        if not text:
            raise SystemExit(1)
        os.environ[VARIABLE] = text.decode()


class Steps:
    """The steps that each rank has done, in a file that survives the process.

    A write takes less than a microsecond: the file is mapped into memory.
    """

    def __init__(self, folder: str | Path, ranks: int | None = None) -> None:
        path = Path(folder, "steps")
        if ranks is not None:  # the supervisor
            path.write_bytes(bytes(_WIDTH * ranks))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def write(self, rank: int, step: int) -> None:
        struct.pack_into("q", self._map, _WIDTH * rank, step)

    def read(self) -> list[int]:
        """Return the steps of each rank."""
        return [int(step) for (step,) in struct.iter_unpack("q", self._map[:])]

    def close(self) -> None:
        self._map.close()


@dataclass(frozen=True, slots=True)
class Report:
    """The error that ended a run, as the process that called ``fit`` has seen it."""

    #: The class and the first line of the message.
    error: str
    #: The rank to blame; ``None`` if the error names none and there are several.
    rank: int | None
    #: True after Ctrl-C.
    interrupted: bool = False

    @classmethod
    def of(cls, error: BaseException, ranks: int) -> Report:
        notes = " ".join(getattr(error, "__notes__", ()))
        lines = str(error).splitlines() or [""]
        named = re.search(r"raised on rank (\d+)", notes) or re.search(r"\brank (\d+)", lines[0])
        # Without a name it is of the process that called fit: rank 0, unless it is no rank.
        rank = int(named[1]) if named else 0
        ctrl_c = isinstance(error, KeyboardInterrupt) and (
            getattr(error, "signal_name", "") in ("", "SIGINT")
        )
        text = lines[0] if named and "rank" in lines[0] else f"{type(error).__name__}: {lines[0]}"
        return cls(text, rank if ranks > 1 else 0, ctrl_c)

    def write(self, folder: str | Path) -> None:
        with suppress(OSError):  # a full disk: the exit code tells less
            Path(folder, "error.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> Report | None:
        """Return the error of the attempt that has ended, and remove it."""
        path = Path(folder, "error.json")
        try:
            report = cls(**json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
            return report
        except (OSError, ValueError, TypeError):
            return None
