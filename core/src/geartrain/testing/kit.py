"""Starts conformance programs for one strategy and reads what they left."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from geartrain.registry import Candidate, Registry
from geartrain.testing.capabilities import Capabilities
from geartrain.testing.launching import Launched, launched
from geartrain.testing.program import COMPARED, Request
from geartrain.trainer import Trainer

#: Samples in one process's batch.
BATCH = 4
#: What one process comes to, by batch and ranks: the same for every strategy of as many ranks, so it is run once a session.
_references: dict[tuple[int, int], Reports] = {}


@dataclass(frozen=True)
class Report:
    """What one scenario left."""

    name: str
    folder: Path
    #: What went wrong with the program, and its output; ``None`` where the scenario came to its end.
    error: str | None = None

    def check(self) -> Report:
        """This report, of a scenario that came to its end.

        Raises:
            AssertionError: it did not; with the program's output.
        """
        assert self.error is None, self.error
        return self

    def ranks(self, command: str = "fit", number: int = 0) -> list[dict[str, Any]]:
        """Each rank's record of the ``number``-th run of a command, by rank."""
        paths = sorted(self.folder.glob(f"{command}-{number}-rank-*.pt"), key=lambda path: int(path.stem.rpartition("-")[2]))
        records = [torch.load(path, weights_only=True) for path in paths]
        assert records, f"no rank recorded {command!r} in {self.folder}: the strategy did not call the hooks of Trainer(plugins=[...])"
        return records

    @cached_property
    def caller(self) -> list[dict[str, Any]]:
        """What the caller of fit, validate, … saw after each run."""
        return list(torch.load(self.folder / "caller.pt", weights_only=True))


@dataclass
class Reports:
    """What one or several programs left."""

    by_name: dict[str, Report] = field(default_factory=dict)
    #: What was there when a program had ended that should not be.
    left_behind: list[str] = field(default_factory=list)


class Kit:
    """One strategy under test, as its test class describes it.

    Args:
        suite: the subclass of ``StrategyConformance``.
        folder: for everything that is written.
        scenarios: what the chosen tests need, in order.

    Raises:
        UsageError: the strategy, its options or a capability are unknown.
    """

    def __init__(self, suite: Any, folder: Path, scenarios: Sequence[str]) -> None:
        self.name: str = suite.strategy
        self.folder = folder
        self.accelerator: str = suite.accelerator
        #: Seconds that one scenario may take, and a failed program to end.
        self.deadline: float = suite.deadline
        self.timeout: float = suite.timeout
        registry = Registry()
        self.candidate: Candidate = registry.find("strategy", self.name)
        part = registry.select("strategy", self.name, suite.options)
        declared = suite.capabilities if suite.capabilities is not None else getattr(part.plugin, "capabilities", None)
        self.can = Capabilities.of(declared, self.candidate.label)
        self.request = replace(self._request(suite.options, suite.devices), optimizer=dict(suite.optimizer))
        self.ranks = self.request.ranks
        self._wanted = [name for name in scenarios if name != "unused_parameters" or self.can.unused_parameters]

    def _request(self, options: Mapping[str, Any], devices: int) -> Request:
        trainer = Trainer(accelerator=self.accelerator, devices=devices, strategy=self.name, strategy_options=options)
        ranks = trainer.plan.processes or devices  # where a launcher decides, as many as there are devices
        return Request(
            strategy=self.name,
            options=dict(options),
            accelerator=self.accelerator,
            devices=devices,
            folder=str(self.folder),
            scenarios=[],
            ranks=ranks,
            batch=BATCH,
            # Ranks that all see all of the data see together what one of them sees.
            global_batch=BATCH * ranks if self.can.sharded_loader else BATCH,
        )

    # --- scenarios of the shared programs --------------------------------------------------------------------------------

    @cached_property
    def reports(self) -> Reports:
        """Of every wanted scenario: all in one program, and in further ones after one that failed."""
        return run_all(replace(self.request, scenarios=self._wanted), self.folder / "ranks", self.deadline)

    def report(self, scenario: str) -> Report:
        """The strategy's report of a scenario that came to its end."""
        return self.reports.by_name[scenario].check()

    def reference(self, scenario: str) -> Report:
        """The same scenario in one process."""
        return self.reference_of(self.ranks, self.request.global_batch).by_name[scenario].check()

    def reference_of(self, ranks: int, batch: int) -> Reports:
        """What one process comes to with batches of ``batch`` samples, on data made for so many ranks."""
        if (ranks, batch) not in _references:
            one = replace(self.request, strategy="single", options={}, optimizer={}, accelerator="cpu", devices=1)
            one = replace(one, scenarios=list(COMPARED), ranks=ranks, batch=batch, global_batch=batch)
            _references[ranks, batch] = run_all(one, self.folder / f"one-process-for-{ranks}", 60)
        return _references[ranks, batch]

    # --- programs of their own -------------------------------------------------------------------------------------------

    @contextmanager
    def program(
        self, scenario: str, name: str, changes: Mapping[str, Any], environments: Sequence[Mapping[str, str]] = ({},)
    ) -> Iterator[Run]:
        """Start a program of one scenario, once for each environment.

        Args:
            name: of its folder.
            changes: of the request.
        """
        folder = self.folder / name
        folder.mkdir(parents=True)
        request = replace(self.request, scenarios=[scenario], folder=str(folder), **changes)
        request.write(folder / "request.json")
        runs: list[Launched] = []
        try:
            for i, environment in enumerate(environments):
                runs.append(Launched(_command(folder / "request.json"), folder, environment, f"program-{i}"))
            yield Run(runs, Report(scenario, folder / scenario), self.deadline)
        finally:
            for run in runs:
                run.kill()


@dataclass(frozen=True)
class Run:
    """Running programs of one scenario."""

    programs: list[Launched]
    report: Report
    deadline: float

    @property
    def folder(self) -> Path:
        """Where the scenario's marks are."""
        return self.report.folder

    @property
    def program(self) -> Launched:
        """The first program."""
        return self.programs[0]

    def finish(self, seconds: float | None = None) -> int:
        """Wait for the first program's end.

        Returns:
            Its exit code.

        Raises:
            AssertionError: it still runs after ``seconds`` (default: the deadline).
        """
        return self.program.wait(self.deadline if seconds is None else seconds)

    def shown(self) -> str:
        """What the programs printed, and where everything is, for messages."""
        return shown(self.programs, self.folder)


def shown(programs: Sequence[Launched], folder: Path, lines: int = 60) -> str:
    """The end of what programs printed, and where the rest is."""
    texts = [f"{program.out}{program.err}".splitlines() for program in programs]
    return "\n".join(["--- the end of the program's output ---", *(line for text in texts for line in text[-lines:]), f"--- {folder} ---"])


def run_all(request: Request, folder: Path, deadline: float) -> Reports:
    """Run scenarios in one program; after one in which it fails or hangs, the rest in another, so that one fault is one failure."""
    reports, left = Reports(), list(request.scenarios)
    for number in itertools.count():
        if not left:
            return reports
        home = folder / str(number)
        home.mkdir(parents=True)
        part = replace(request, scenarios=left, folder=str(home))
        part.write(home / "request.json")
        with launched(*_command(home / "request.json")[1:], folder=home, name="program") as program:
            problem = _watch(program, home, left, deadline)
            done = [name for name in left if (home / name / "done").exists()]
            for name in done:
                reports.by_name[name] = Report(name, home / name)
            left = [name for name in left if name not in done]
            if problem is None:
                reports.left_behind += program.left_behind()
            else:
                # A failure after the last scenario is the program's end's; it is the last one's, which nothing else would show.
                failed = left.pop(0) if left else done[-1]
                reports.by_name[failed] = Report(failed, home / failed, f"{problem}\n{shown([program], home / failed)}")
    raise AssertionError("unreachable")


def _watch(program: Launched, folder: Path, names: Sequence[str], deadline: float) -> str | None:
    """Wait for a program as long as it gets on.

    Returns:
        What went wrong, if something did.
    """
    done, since = -1, time.monotonic()
    while (code := program.process.poll()) is None:
        now = sum((folder / name / "done").exists() for name in names)
        if now > done:
            done, since = now, time.monotonic()
        elif time.monotonic() - since > deadline:
            what = f"the scenario {names[done]!r}" if done < len(names) else "the end of the program"
            return f"hung: {what} was not done within {deadline:.0f} s, so it was stopped"
        time.sleep(0.02)
    return None if code == 0 else f"the program ended with exit code {code}"


def _command(request: Path) -> list[str]:
    return [sys.executable, "-m", "geartrain.testing.program", str(request)]


def need(condition: bool, reason: str) -> None:
    """Skip the running test with a reason unless ``condition`` holds."""
    if not condition:
        pytest.skip(reason)
