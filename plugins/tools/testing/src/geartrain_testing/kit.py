"""Start conformance programs for one strategy and read their reports."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from geartrain import Trainer, UsageError
from geartrain.plugin_api import InstalledPlugin, Registry
from geartrain_testing.capabilities import Capabilities
from geartrain_testing.launching import Launched, free_port
from geartrain_testing.program import COMPARED, Request, write
from geartrain_testing.recorder import PROGRESS

#: Samples in one process's batch.
BATCH = 4
#: The least number of seconds for a program's first scenario, which includes each rank's imports.
START = 60.0
#: Reports of one process, by number of ranks and global batch. They are the same for all strategies
#: with equally many ranks, so one process runs once a session.
_references: dict[tuple[int, int], Reports] = {}


@dataclass(frozen=True)
class Report:
    """The report of one scenario."""

    name: str
    folder: Path
    #: The program's failure and its output; ``None`` if the scenario ended.
    error: str | None = None

    def check(self, capability: str = "") -> Report:
        """Return this report if its scenario ended.

        Args:
            capability: a strategy that declares it off need not end this scenario.

        Raises:
            AssertionError: the scenario did not end; the message has the program's output.
        """
        assert self.error is None, self.error + (fits(f"{capability}=False") if capability else "")
        return self

    def ranks(self, command: str = "fit", number: int = 0) -> list[dict[str, Any]]:
        """Return each rank's record of the ``number``-th run of a command, by rank."""
        paths = sorted(
            self.folder.glob(f"{command}-{number}-rank-*.pt"),
            key=lambda path: int(path.stem.rpartition("-")[2]),
        )
        records = [torch.load(path, weights_only=True) for path in paths]
        assert records, (
            f"no rank recorded {command!r} in {self.folder}: "
            "the strategy did not call the hooks of Trainer(plugins=[...])"
        )
        return records

    @cached_property
    def caller(self) -> list[dict[str, Any]]:
        """The caller's view after each run of fit, validate, …"""
        return list(torch.load(self.folder / "caller.pt", weights_only=True))


@dataclass
class Reports:
    """The reports of one request, from one or several programs."""

    by_name: dict[str, Report] = field(default_factory=dict)
    #: Processes, shared memory and temporary files that still existed after a program had ended.
    left_behind: list[str] = field(default_factory=list)


#: Scenario -> the capability that a strategy may declare off if the scenario fails.
_CAPABILITY_OF = {
    "uneven_inputs": "uneven_inputs",
    "uneven_training": "uneven_inputs",
    "unused_parameters": "unused_parameters",
    "weighted_loss": "weighted_loss",
}

#: The start of a shared scenario: on the class's devices, on one device, on two 1-device nodes, or
#: on three devices: with two ranks, a neighbour is everyone.
RANKS, ONE_DEVICE, TWO_NODES, THREE = "ranks", "one-device", "two-nodes", "three"


class Programs:
    """The programs that run the shared scenarios of one kit.

    Kits whose classes name the same ``program`` share them.

    Args:
        folder: the folder for all files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kits: list[Kit] = []
        self._reports: dict[str, dict[Kit, Reports]] = {}

    def reports(self, start: str) -> dict[Kit, Reports]:
        """Return the reports of the programs that start in this way, by kit.

        The programs run at the first call. The program on one device first runs the references with
        which kits are compared, unless another one has run them.
        """
        if start not in self._reports:
            kits = [kit for kit in self.kits if kit.wanted.get(start)]
            compared = {
                key: one
                for kit in self.kits
                for key, one in kit.references()
                if key not in _references
            }
            references = compared if start == ONE_DEVICE else {}
            requests = [*references.values(), *(kit.shared_request(start) for kit in kits)]
            deadlines = [60.0] * len(references) + [kit.deadline for kit in kits]
            environments: list[dict[str, str]] = (
                [{"NODE_RANK": str(rank)} for rank in range(2)] if start == TWO_NODES else [{}]
            )
            found = run_all(requests, self.folder / start, deadlines, environments)
            _references.update(zip(references, found, strict=False))
            self._reports[start] = dict(zip(kits, found[len(references) :], strict=True))
        return self._reports[start]


class Kit:
    """One strategy under test, as its test class describes it.

    Args:
        suite: the subclass of ``StrategyConformance``.
        folder: the folder for all files.
        wanted: how programs start -> the shared scenarios that the chosen tests need, in order.
        programs: run these scenarios; default: programs of this kit alone.

    Raises:
        UsageError: the strategy, an option or a capability is unknown.
    """

    def __init__(
        self,
        suite: Any,
        folder: Path,
        wanted: Mapping[str, Sequence[str]],
        programs: Programs | None = None,
    ) -> None:
        self.name: str = suite.strategy
        self.folder = folder
        self.accelerator: str = suite.accelerator
        #: Seconds that one scenario may take, and a failed program to end.
        self.deadline: float = suite.deadline
        self.timeout: float = suite.timeout
        registry = Registry()
        self.candidate: InstalledPlugin = registry.find("strategy", self.name)
        part = registry.select("strategy", self.name, suite.options)
        declared = (
            suite.capabilities
            if suite.capabilities is not None
            else getattr(part.plugin, "capabilities", None)
        )
        self.can = Capabilities.of(declared, self.candidate.label)
        self.request = replace(
            self._request(suite.options, suite.devices), optimizer=dict(suite.optimizer)
        )
        self.ranks = self.request.ranks
        unsupported = [
            name for name in ("unused_parameters", "weighted_loss") if not getattr(self.can, name)
        ]
        self.wanted = {
            start: [name for name in names if name not in unsupported]
            for start, names in wanted.items()
        }
        if self.request.devices == 1:
            self.wanted.pop(ONE_DEVICE, None)  # the other scenarios run on one device
        if not self.can.multi_node:
            self.wanted.pop(TWO_NODES, None)
        #: The request for three devices; ``None`` if the other scenarios run on another number than
        #: two, or the strategy refuses three.
        self.three: Request | None = None
        if self.request.devices == 2 and THREE in self.wanted:
            with suppress(UsageError):
                self.three = replace(
                    self._request(suite.options, 3), optimizer=dict(suite.optimizer)
                )
        if self.three is None:
            self.wanted.pop(THREE, None)
        self.programs = Programs(folder) if programs is None else programs
        self.programs.kits.append(self)
        self._key, self.start = self, RANKS

    def _request(self, options: Mapping[str, Any], devices: int) -> Request:
        trainer = Trainer(
            accelerator=self.accelerator,
            devices=devices,
            strategy=self.name,
            strategy_options=options,
        )
        # The plan has no number of processes if a launcher decides it: then one per device.
        ranks = trainer.plan.processes or devices
        return Request(
            strategy=self.name,
            options=dict(options),
            accelerator=self.accelerator,
            devices=devices,
            folder=str(self.folder),
            scenarios=[],
            ranks=ranks,
            batch=BATCH,
            # Without sharding, every rank sees all data: the global batch is one rank's batch.
            global_batch=BATCH * ranks if self.can.sharded_loader else BATCH,
        )

    # --- scenarios of shared programs -------------------------------------------------------------

    def shared_request(self, start: str) -> Request:
        """Return the request for the wanted shared scenarios."""
        chosen = self.three if start == THREE and self.three is not None else self.request
        request = replace(chosen, scenarios=list(self.wanted[start]))
        if start == ONE_DEVICE:
            return replace(request, devices=1, ranks=1, global_batch=BATCH)
        if start == TWO_NODES:
            return replace(
                request,
                devices=1,
                num_nodes=2,
                ranks=2,
                global_batch=2 * BATCH if self.can.sharded_loader else BATCH,
            )
        return request

    @property
    def reports(self) -> Reports:
        """The reports of every wanted scenario on the class's devices."""
        return self.programs.reports(RANKS)[self]

    def on_three(self) -> Kit | None:
        """Return this kit with the reports of the programs on three devices, if there are any."""
        if self.three is None:
            return None
        kit = copy(self)
        kit.request, kit.ranks, kit.start = self.three, self.three.ranks, THREE
        return kit

    def report(self, scenario: str, start: str = "") -> Report:
        """Return the strategy's report of a scenario; fail the test if the scenario did not end.

        Args:
            start: how its program starts; default: as this kit's programs.
        """
        start = start or self.start
        capability = "multi_node" if start == TWO_NODES else _CAPABILITY_OF.get(scenario, "")
        return self.programs.reports(start)[self._key].by_name[scenario].check(capability)

    def reference(self, scenario: str, start: str = RANKS) -> Report:
        """Return the report of the same scenario in one process."""
        request = self.shared_request(start)
        self.programs.reports(ONE_DEVICE)
        return _references[request.ranks, request.global_batch].by_name[scenario].check()

    def references(self) -> Iterator[tuple[tuple[int, int], Request]]:
        """Yield the requests that one process runs for this kit, each with its reports' key."""
        for start, names in self.wanted.items():
            if set(names) & set(COMPARED):
                request = self.shared_request(start)
                one = replace(
                    request,
                    strategy="single",
                    options={},
                    optimizer={},
                    accelerator="cpu",
                    devices=1,
                    num_nodes=1,
                )
                yield (
                    (request.ranks, request.global_batch),
                    replace(one, scenarios=list(COMPARED), batch=request.global_batch),
                )

    # --- programs with one scenario ---------------------------------------------------------------

    @contextmanager
    def program(
        self,
        scenario: str,
        name: str,
        changes: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Run]:
        """Start a program of one scenario.

        Args:
            name: the name of its folder.
            changes: fields of the request that differ from the kit's.
        """
        folder = self.folder / name
        folder.mkdir(parents=True)
        requests = folder / "requests.json"
        write(
            [replace(self.request, scenarios=[scenario], folder=str(folder), **changes)], requests
        )
        program = Launched(_command(requests), folder, environment, "program")
        try:
            yield Run(
                program,
                Report(scenario, folder / scenario),
                max(self.deadline, START),
                self.deadline,
            )
        finally:
            program.kill()


@dataclass(frozen=True)
class Run:
    """A running program of one scenario."""

    program: Launched
    report: Report
    #: Seconds within which its ranks must start, and then seconds within which it must end.
    deadline: float
    ending: float

    @property
    def folder(self) -> Path:
        """The folder with the scenario's marks."""
        return self.report.folder

    def finish(self, seconds: float | None = None) -> int:
        """Wait for the program's end.

        Returns:
            Its exit code.

        Raises:
            AssertionError: the program still runs ``seconds`` (default: ``ending``) after a rank's
                run started.
        """
        until = time.monotonic() + self.deadline
        while (
            self.program.process.poll() is None
            and not list(self.folder.glob("started-*"))
            and time.monotonic() < until
        ):
            time.sleep(0.02)
        return self.program.wait(self.ending if seconds is None else seconds)

    def shown(self) -> str:
        """Return the end of the program's output and the path of its folder, for messages."""
        return shown([self.program], self.folder)


def shown(programs: Sequence[Launched], folder: Path, lines: int = 60) -> str:
    """Return the end of the programs' output and the folder with the rest."""
    texts = [f"{program.out}{program.err}".splitlines() for program in programs]
    return "\n".join(
        [
            "--- the end of the program's output ---",
            *(line for text in texts for line in text[-lines:]),
            f"--- {folder} ---",
        ]
    )


def run_all(
    requests: Sequence[Request],
    folder: Path,
    deadlines: Sequence[float],
    environments: Sequence[Mapping[str, str]] = ({},),
) -> list[Reports]:
    """Run all scenarios of the requests in one program, or in one program per environment.

    After a scenario in which a program fails or hangs, new programs run the remaining scenarios, so
    that one fault is one failure.

    Args:
        deadlines: seconds that a scenario may take, for each request.
        environments: variables of the programs that start together. Several environments are
            several nodes, and get the same MASTER_PORT.

    Returns:
        The reports of each request.
    """
    reports = [Reports() for _ in requests]
    remaining = [(i, name) for i, request in enumerate(requests) for name in request.scenarios]
    for number in itertools.count():
        if not remaining:
            return reports
        home = folder / str(number)
        # Several requests get one folder each.
        homes = [
            home / f"{i}-{request.strategy}" if len(requests) > 1 else home
            for i, request in enumerate(requests)
        ]
        parts = []
        for i in dict.fromkeys(i for i, _ in remaining):
            homes[i].mkdir(parents=True)
            parts.append(
                replace(
                    requests[i],
                    scenarios=[name for j, name in remaining if j == i],
                    folder=str(homes[i]),
                )
            )
        write(parts, home / "requests.json")
        nodes = (
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            if len(environments) > 1
            else {}
        )
        programs: list[Launched] = []
        try:
            for i, environment in enumerate(environments):
                programs.append(
                    Launched(
                        _command(home / "requests.json"),
                        home,
                        {**nodes, **environment},
                        f"program-{i}",
                    )
                )
            todo = [(homes[i] / name, name, deadlines[i]) for i, name in remaining]
            problem = _watch(programs, todo)
            done = [(i, name) for i, name in remaining if (homes[i] / name / "done").exists()]
            for i, name in done:
                reports[i].by_name[name] = Report(name, homes[i] / name)
            remaining = [each for each in remaining if each not in done]
            if problem is None:
                behind = [message for program in programs for message in program.left_behind()]
                for i in {i for i, _ in done}:
                    reports[i].left_behind += behind
            else:
                # A program may also fail at its end: then the last scenario reports the failure.
                i, name = remaining.pop(0) if remaining else done[-1]
                reports[i].by_name[name] = Report(
                    name, homes[i] / name, f"{problem}\n{shown(programs, homes[i] / name)}"
                )
        finally:
            for program in programs:
                program.kill()
    raise AssertionError("unreachable")


def _watch(programs: Sequence[Launched], todo: Sequence[tuple[Path, str, float]]) -> str | None:
    """Wait for programs while they make progress.

    Args:
        todo: the scenarios in order: folder, name, and seconds that one may take.

    Returns:
        The failure, if any.
    """
    done, since = -1, time.monotonic()
    while None in (codes := [program.process.poll() for program in programs]):
        current = sum((folder / "done").exists() for folder, _, _ in todo)
        _, name, deadline = todo[min(current, len(todo) - 1)]
        if current > done:
            done, since = current, time.monotonic()
        elif time.monotonic() - since > (deadline if current else max(deadline, START)):
            message = f"the scenario {name!r}" if done < len(todo) else "the end of the program"
            state = _slow_or_hung(todo[min(current, len(todo) - 1)][0], deadline)
            return f"{state}: {message} was not done within {deadline:.0f} s"
        time.sleep(0.02)
    return next((f"the program ended with exit code {code}" for code in codes if code), None)


def _slow_or_hung(folder: Path, deadline: float) -> str:
    """Return "slow" if the ranks of a late scenario still make steps, otherwise "hung"."""
    ages = {
        path.name.removeprefix(PROGRESS): time.time() - path.stat().st_mtime
        for path in folder.glob(f"{PROGRESS}*")
    }
    last = ", ".join(f"rank {rank} {age:.1f} s ago" for rank, age in sorted(ages.items())) or "none"
    if min(ages.values(), default=deadline) < max(1.0, deadline / 10):
        return f"slow, not hung (last steps: {last}). Fix: try --deadline {2 * deadline:.0f}"
    return f"hung (last steps: {last})"


def fits(capability: str) -> str:
    """Return the end of a message: the capability to declare if the failure is by design."""
    return f"\nIf this is the strategy's design, declare the capability {capability}"


def _command(requests: Path) -> list[str]:
    return [sys.executable, "-m", "geartrain_testing.program", str(requests)]


def need(condition: bool, reason: str) -> None:
    """Skip the running test with a reason unless ``condition`` holds."""
    if not condition:
        pytest.skip(reason)
