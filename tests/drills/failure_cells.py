"""Run cells of the table of failures and print each result.

A cell is a strategy, the loader's workers and their start method, an event, and the rank of the
event; ``cell.py`` trains it. Each cell must end within 15 s of its event, show the user's error,
exit with the right code, run the caller's ``except`` and ``finally``, and leave no process, port or
file. Examples::

    python tests/drills/failure_cells.py --strategies ddp,ddp_spawn --jobs 2
    python tests/drills/failure_cells.py --strategies bagua,dp,ddp2 --pairwise
    python tests/drills/failure_cells.py --strategies ddp --sample 20 --repeat 10 --seed 1
    python tests/drills/failure_cells.py --cell ddp:2p:fork:sample:1 --show
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from geartrain_testing.launching import Launched, free_port, launched, listening, until

CELL = str(Path(__file__).with_name("cell.py"))
#: Loader workers (``p``: persistent), and their start method.
LOADERS = [
    ("0", "-"),
    *((loader, start) for loader in ("1", "2", "2p") for start in ("fork", "spawn")),
]
#: ``exit`` is ``os._exit(0)`` in a step, ``kill`` is SIGKILL in a step.
EVENTS = [
    ("success", 0),
    *((event, rank) for event in ("sample", "step", "exit", "kill") for rank in (0, 1)),
]
#: Strategies whose rank 0 is the process that called ``fit``; it starts the other ranks.
RANK_0_STARTS = ("ddp", "bagua", "horovod")
STRATEGIES = (*RANK_0_STARTS, "ddp_spawn", "dp", "ddp2")
#: Seconds until the event of a cell; and from the event: until its end, until its stacks are
#: printed, and until it is killed.
STARTED, LIMIT, STACKS, HANG = 120.0, 15.0, 18.0, 25.0
#: The values of ``cell.py``, which is not imported because it imports torch.
OWN, SHOW_STACK = "the user's own error", signal.SIGWINCH
#: The allowed content of a run's folder; ``logs`` and ``checkpoints`` are folders.
RUN_FOLDER = {
    *("plan.json", "metrics.jsonl", "provenance.jsonl", "summary.json", "last.ckpt"),
    *("logs", "checkpoints"),
}
_CONNECTION = re.compile(
    r"connection (closed|reset)|broken pipe|gloo|HorovodInternalError", re.IGNORECASE
)


@dataclass(frozen=True)
class Cell:
    """One cell of the table. Under dp the rank is a device of the process; under ddp2, a node."""

    strategy: str
    loader: str
    start: str
    event: str
    rank: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell with this id."""
        strategy, loader, start, event, rank = text.split(":")
        return cls(strategy, loader, start, event, int(rank))

    @property
    def id(self) -> str:
        return f"{self.strategy}:{self.loader}:{self.start}:{self.event}:{self.rank}"

    @property
    def output(self) -> bool:
        """True if the run has a folder: half of the cells, for each pair of other properties."""
        loaders, events = ("0", "1", "2", "2p"), ("success", "sample", "step", "exit", "kill")
        return (
            loaders.index(self.loader)
            + events.index(self.event)
            + (self.start == "spawn" and self.rank)
        ) % 2 == 1

    def ends(self, program: int) -> bool:
        """True if the event ends this program at once. ddp2 has one program per node."""
        if self.event not in ("exit", "kill"):
            return False
        if self.strategy == "dp":
            return True
        return self.rank == program and self.strategy != "ddp_spawn"


@dataclass
class Result:
    """The result of a cell."""

    cell: Cell
    #: Seconds from the event to the end of the program; ``None`` without an event or an end.
    seconds: float | None = None
    #: Exit codes of the cell's programs.
    codes: list[int | None] = field(default_factory=list)
    #: Failures.
    wrong: list[str] = field(default_factory=list)
    #: Remarks that are not failures.
    notes: list[str] = field(default_factory=list)
    #: The output of the programs, and the logs of their ranks.
    printed: str = ""

    @property
    def verdict(self) -> str:
        return ("; ".join(self.wrong) or "ok") + "".join(f" [{note}]" for note in self.notes)


def all_cells(strategy: str) -> list[Cell]:
    """Return every cell of a strategy."""
    return [Cell(strategy, *loader, *event) for loader in LOADERS for event in EVENTS]


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Return few cells that together contain every pair of properties of all cells."""

    def pairs(cell: Cell) -> set[object]:
        facts = {
            name: getattr(cell, name) for name in ("loader", "start", "event", "rank", "output")
        }
        return set(combinations(facts.items(), 2))

    chosen: list[Cell] = []
    missing = set().union(*map(pairs, cells))
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


# --- one cell ------------------------------------------------------------------------------------


def run_cell(cell: Cell, folder: Path, spawn_method: str = "forkserver") -> Result:
    """Run a cell in an empty folder and judge it. All its processes are ended."""
    result = Result(cell)
    arguments = [cell.strategy, cell.loader, cell.start, cell.event, str(cell.rank)]
    arguments += ["--spawn-method", spawn_method]
    environment = {"OMP_NUM_THREADS": "1"}
    nodes = 2 if cell.strategy == "ddp2" else 1
    if nodes > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if cell.output:
        arguments.append("--output")
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                launched(
                    CELL,
                    *arguments,
                    folder=folder,
                    name=f"node-{node}",
                    NODE_RANK=str(node),
                    **environment,
                )
            )
            for node in range(nodes)
        ]
        try:
            _run(result, programs, folder)
        finally:
            result.codes = [program.process.poll() for program in programs]
            result.printed = "\n".join(_printed(programs, folder))
    return result


def _run(result: Result, programs: list[Launched], folder: Path) -> None:
    cell, event = result.cell, folder / "marks" / "event"
    with suppress(AssertionError):
        until(
            lambda: (
                event.exists() or all(program.process.poll() is not None for program in programs)
            ),
            STARTED,
            "the event",
        )
    if not event.exists():
        result.wrong.append("no event")
        return
    moment = float(event.read_text())
    if not _wait(programs, moment):
        result.wrong.append("hang")
        return
    result.seconds = time.time() - moment
    if result.seconds > LIMIT:
        result.wrong.append(f"took {result.seconds:.0f} s")
    left = _left(cell, programs, max(time.time() + 5, moment + LIMIT))
    result.wrong += [f"left {what}" for what in left]
    result.wrong += _judge_ends(cell, programs, folder, result.notes)
    if cell.output:
        result.wrong += _judge_folder(cell, folder / "run", result.notes)


def _wait(programs: list[Launched], moment: float) -> bool:
    """Wait for all programs and print the stacks of those that hang. True if all ended."""
    shown = False
    while any(program.process.poll() is None for program in programs):
        now = time.time()
        if now > moment + HANG:
            return False
        if now > moment + STACKS and not shown:
            shown = True
            for pid in (pid for program in programs for pid in program.processes()):
                with suppress(ProcessLookupError):
                    os.kill(pid, SHOW_STACK)
                time.sleep(0.2)  # so that the lines of several stacks do not mix
        time.sleep(0.02)
    return True


def _left(cell: Cell, programs: list[Launched], deadline: float) -> list[str]:
    """Return processes, ports and files that the programs have not removed by the deadline."""
    while True:
        left = [what for program in programs for what in program.left_behind(0)]
        if cell.event != "success":  # a failed run keeps its logs
            left = [what for what in left if not what.startswith("temporary file geartrain-logs-")]
        if not left or time.time() > deadline:
            break
        time.sleep(0.05)
    ports = listening([pid for program in programs for pid in program.processes()])
    kinds = Counter(
        re.sub(r"pymp-\w+", "pymp-*", what)[:120] for what in left if "/listener-" not in what
    )
    return [what if count == 1 else f"{count} x {what}" for what, count in kinds.items()] + [
        f"a port on {address}" for address in ports
    ]


def _judge_ends(
    cell: Cell, programs: list[Launched], folder: Path, notes: list[str]
) -> Iterator[str]:
    """Yield failures in exit codes, messages and markers."""
    for number, program in enumerate(programs):
        code, error, ends = program.process.returncode, program.err, cell.ends(number)
        other_node = cell.strategy == "ddp2" and number != cell.rank
        caller = _lines(folder / "marks" / f"except-{number}")
        finally_ran = len(_lines(folder / "marks" / f"finally-{number}"))
        # --- the exit code
        if ends and cell.event == "kill":
            if code != -signal.SIGKILL:
                yield f"exit code {code}"
            continue
        if ends and cell.strategy not in RANK_0_STARTS:  # no other process can change the exit code
            continue
        if (code == 0) != (cell.event == "success"):
            yield f"exit code {code}"
        if ends:
            if f"rank {cell.rank}" not in error:
                yield "no message"
            continue
        # --- the caller
        if finally_ran != 1:
            yield f"finally ran {finally_ran} times"
        if len(caller) != (cell.event != "success"):
            yield f"except ran {len(caller)} times"
        # --- the message
        if cell.event == "success":
            if _first_error(error):
                yield f"printed {_first_error(error)!r}"
            continue
        shown = caller[0] if caller else error
        if not _names(cell, shown):
            if other_node:
                notes.append(f"the other node's error is {_short(shown)}")
            elif caller:
                yield f"the caller's error is {_short(shown)}"
            else:
                yield "the cause is not shown"
        if (first := _first_error(error)) and _CONNECTION.search(first) and not _names(cell, first):
            notes.append(f"shown first: {first[:80]}")
    if cell.strategy in RANK_0_STARTS and cell.event not in ("exit", "kill"):
        ran = len(_lines(folder / "marks" / "finally-1"))
        if ran != 1:
            notes.append(f"rank 1's finally ran {ran} times")


def _judge_folder(cell: Cell, run: Path, notes: list[str]) -> Iterator[str]:
    """Yield failures in the run's folder: incomplete files, or a summary without the cause."""
    for path in sorted(run.iterdir()) if run.is_dir() else ():
        # Its process has ended without an exit handler. The lock itself is released.
        is_dead = path.name == "run.lock" and cell.event in ("exit", "kill") and cell.rank == 0
        if path.name not in RUN_FOLDER and not is_dead:
            yield f"left run/{path.name}"
    for path in sorted(run.rglob("*")):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                for line in path.read_text().splitlines():
                    json.loads(line)
            elif path.suffix == ".ckpt":
                zipfile.ZipFile(path).testzip()
        except (ValueError, zipfile.BadZipFile):
            yield f"{path.name} is not complete"
    summary = run / "summary.json"
    with suppress(ValueError):
        text = json.dumps(json.loads(summary.read_text())) if summary.exists() else ""
        status = json.loads(text)["status"] if text else None
        if cell.event == "success":
            if status != "done":
                yield f"summary.json has {status}"
        elif not text:
            if cell.event in ("exit", "kill") and cell.rank == 0:
                if not cell.ends(0):
                    notes.append("no summary.json")
            elif cell.strategy != "dp" or not cell.ends(0):
                yield "no summary.json"
        elif not _names(cell, text):
            message = f"summary.json has {_short(json.loads(text).get('error', status))}"
            if cell.strategy == "ddp2" and cell.rank == 1:
                notes.append(message)
            else:
                yield message


def _names(cell: Cell, text: str) -> bool:
    """True if a text names the cause: the user's error, or the rank that ended."""
    if cell.event in ("sample", "step"):
        return OWN in text.replace("\\'", "'")
    return re.search(rf"\brank {cell.rank}\b", text) is not None


def _first_error(printed: str) -> str:
    """Return the first line that names an error, or an empty string."""
    for line in printed.splitlines():
        line = re.sub(r"^\[rank\d+\]: ", "", line)
        if re.match(
            r"[\w.]*(Error|Exception|Interrupt|Interrupted)\b|geartrain: |terminate called", line
        ):
            return line
    return ""


def _short(text: str) -> str:
    return repr(re.sub(r"^\d+ ", "", text).strip("\"'")[:100])


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _printed(programs: Iterable[Launched], folder: Path) -> Iterator[str]:
    for program in programs:
        for what in (program.out, program.err):
            if what:
                yield what
        for path in sorted(
            {*program.temporary.rglob("rank-*.log"), *folder.glob("run/logs/rank-*.log")}
        ):
            yield f"--- {path.name} ---\n{path.read_text(errors='replace')}"


# --- many cells ----------------------------------------------------------------------------------


def run_cells(
    cells: Sequence[Cell], jobs: int, spawn_method: str, folder: Path
) -> Iterator[Result]:
    """Run cells, several at a time, and yield each result when it is ready."""

    def run(number: int, cell: Cell) -> Result:
        own = folder / str(number)
        own.mkdir()
        try:
            return run_cell(cell, own, spawn_method)
        finally:
            shutil.rmtree(own, ignore_errors=True)

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, *each) for each in enumerate(cells)]):
            yield future.result()


def summary(results: Sequence[Result]) -> str:
    """Return a Markdown table with one line per strategy."""
    lines = [
        "| strategy | cells | ok | slowest end | not ok |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for strategy in dict.fromkeys(result.cell.strategy for result in results):
        own = [result for result in results if result.cell.strategy == strategy]
        seconds = max(
            (result.seconds for result in own if result.seconds is not None), default=float("nan")
        )
        failed = ", ".join(
            sorted({result.cell.id.partition(":")[2] for result in own if result.wrong})
        )
        ok = sum(not result.wrong for result in own)
        lines.append(f"| {strategy} | {len(own)} | {ok} | {seconds:.1f} s | {failed or '-'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--strategies", default="ddp,ddp_spawn", help=f"some of {','.join(STRATEGIES)}"
    )
    parser.add_argument(
        "--cell",
        action="append",
        type=Cell.parse,
        help="run only this cell; may be repeated",
    )
    parser.add_argument(
        "--pairwise", action="store_true", help="run few cells that cover every pair of properties"
    )
    parser.add_argument("--sample", type=int, metavar="K", help="choose K cells at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of --sample")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run each cell N times")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument(
        "--spawn-method",
        default="forkserver",
        choices=("forkserver", "spawn", "fork"),
        help="how ddp_spawn starts ranks",
    )
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument(
        "--show", action="store_true", help="print the output of a cell that is not ok"
    )
    options = parser.parse_args()

    cells = list(options.cell or ())
    for strategy in () if options.cell else options.strategies.split(","):
        every = all_cells(strategy)
        cells += pairwise(every) if options.pairwise else every
    if options.sample is not None:
        cells = random.Random(options.seed).sample(cells, min(options.sample, len(cells)))
    cells = [cell for cell in cells for _ in range(options.repeat)]

    results = []
    with tempfile.TemporaryDirectory(prefix="cells-") as folder:
        for result in run_cells(cells, options.jobs, options.spawn_method, Path(folder)):
            results.append(result)
            seconds = "     -" if result.seconds is None else f"{result.seconds:4.1f} s"
            output = "output" if result.cell.output else "      "
            print(f"{result.cell.id:28} {output} {seconds}  {result.verdict}", flush=True)
            if options.show and result.wrong:
                print(result.printed, flush=True)
    print(f"\n{summary(results)}")
    if options.json is not None:
        rows = [
            {
                "cell": r.cell.id,
                "output": r.cell.output,
                "seconds": r.seconds,
                "codes": r.codes,
                "wrong": r.wrong,
                "notes": r.notes,
            }
            | ({"printed": r.printed} if r.wrong else {})
            for r in results
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(result.wrong for result in results))


if __name__ == "__main__":
    main()
