"""``restarts``: start a failed fit again. ``--max-restarts N`` selects it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from geartrain import Plan, Run, UsageError, hookimpl
from geartrain.plugin_api import detect
from geartrain_parallel.bootstrap import die_with_parent
from geartrain_parallel.rerun_command import command, reason_not_rerunnable
from geartrain_resilience.exchange import Attempt, Report, Steps
from geartrain_resilience.supervision import Supervisor

_LABEL = "geartrain-resilience[restarts]"
#: The key of a checkpoint with the lines of each file of metrics when it was saved.
_KEY = "metrics_lines"


class Restarts:
    """Start a failed ``fit`` on one node again from its last checkpoint, at most ``limit`` times.

    The process of the command line starts the run as another process and watches it.

    Args:
        limit: the most restarts.

    Raises:
        UsageError: ``limit`` is negative.
    """

    def __init__(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise UsageError(f"max_restarts={limit!r} must be a whole number, at least 0.")
        self.limit = limit
        self._steps: Steps | None = None
        #: The files of metrics, on rank 0, by name.
        self._files: dict[str, Path] = {}
        #: Their lines in the checkpoint from which this run goes on.
        self._lines: dict[str, int] = {}

    def run_command(self, plan: Plan, plugins: Sequence[Any], stdout: int | None) -> int | None:
        """Run this process's command in another process, and again after each failure.

        The command line calls it before it makes the module.

        Args:
            plan: the plan, which was checked.
            plugins: the run's.
            stdout: the descriptor for the standard output of the last attempt; ``None``: each
                attempt has that of this process.

        Returns:
            The exit code; ``None`` in the process that runs, and in its ranks.

        Raises:
            UsageError: the command cannot be run again.
        """
        place, attempt = detect(), Attempt.current()
        if attempt is not None or place is not None:
            if attempt is not None and place is None:
                die_with_parent()
                if os.getppid() != attempt.supervisor:
                    raise SystemExit(1)  # it has gone meanwhile
                attempt.wait_for_turn()
            return None
        reason = reason_not_rerunnable()
        if reason:
            raise UsageError(
                f"{_LABEL} runs the same command again, and {reason}. "
                "Fix: leave --max-restarts out, or put the program in a file and run that"
            )
        assert plan.output is not None  # otherwise check_plan has raised
        supervisor = Supervisor(
            command(),
            self.limit,
            plan.output.absolute(),
            plan.processes or 1,
            plan.options.max_steps,
            {name: count_lines(path) for name, path in metrics_files(plan.output, plugins).items()},
            stdout,
        )
        code = supervisor.run()
        supervisor.print_result()
        return code

    # --- refusals ---------------------------------------------------------------------------------

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        given, place = f"max_restarts={self.limit}", detect()
        if plan.options.fast_dev_run:
            raise UsageError(
                f"{given}: fast_dev_run saves nothing from which a run could go on. "
                "Fix: leave one of them out"
            )
        if plan.output is None:
            raise UsageError(
                f"{given} needs a folder for the run, from whose checkpoints it goes on. "
                "Fix: --output DIR"
            )
        if place is not None and place.launcher != "geartrain":
            hint = "use the restarts of that launcher, with --resume auto"
            if place.launcher == "torchrun":
                hint = f"torchrun --max-restarts {self.limit}, and --resume auto here"
            raise UsageError(f"{given}: {place.launcher} started this process. Fix: {hint}")
        if plan.num_nodes > 1:
            raise UsageError(
                f"{given} restarts a run on one node, and this has {plan.num_nodes}. Fix: "
                f"torchrun --nnodes {plan.num_nodes} --max-restarts {self.limit}, and "
                "--resume auto here"
            )

    # It is the outermost wrapper, and its events come first, because implied plugins are the last.
    @hookimpl(wrapper=True)
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Generator[None, Any, Any]:
        attempt = Attempt.current()
        if run.command != "fit":
            return (yield)
        if attempt is None:
            raise UsageError(
                f"max_restarts={self.limit} needs a command line that can be run again. Fix: "
                "geartrain fit FILE --max-restarts N, or geartrain.cli(Module) in the script"
            )
        try:
            return (yield)
        except BaseException as error:
            place = detect()
            if place is None or place.rank == 0:
                Report.of(error, run.plan.processes or 1).write(attempt.folder)
            raise

    # --- in each rank -----------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def load_checkpoint(self) -> Generator[None, Any, Any]:
        state = yield
        self._lines = state.get(_KEY, {}) if isinstance(state, dict) else {}
        return state

    @hookimpl(wrapper=True)
    def save_checkpoint(self, state: dict[str, Any]) -> Generator[None, Any, Any]:
        if self._files:
            state[_KEY] = {name: count_lines(path) for name, path in self._files.items()}
        return (yield)

    @hookimpl  # before the files are opened
    def on_run_start(self, run: Run) -> None:
        attempt, self._files = Attempt.current(), {}
        if attempt is None or run.command != "fit" or run.output is None:
            return
        self._steps = Steps(attempt.folder)
        self._steps.write(run.world.rank, run.step)
        if run.world.rank != 0:
            return
        self._files = metrics_files(run.plan.output, (part.plugin for part in run.hooks.parts))
        if attempt.number:
            for name, path in self._files.items():
                shorten(path, self._lines.get(name, attempt.lines.get(name, 0)))
            self._tell(run, attempt)

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        if self._steps is not None:
            self._steps.write(run.world.rank, run.step)

    def _tell(self, run: Run, attempt: Attempt) -> None:
        """Print what failed and from where the run goes on, and append it to restarts.jsonl."""
        resumed = run.loop.resumed
        path = None if resumed is None else resumed.path
        start = "from scratch" if path is None else f"from step {run.step} ({path.name})"
        print(
            f"geartrain: restart {attempt.number} of {attempt.limit}: {attempt.failure}. "
            f"The run goes on {start}",
            file=sys.stderr,
            flush=True,
        )
        assert run.output is not None
        facts = {"restart": attempt.number, "failure": attempt.failure, "resumed_at": run.step}
        with (run.output / "restarts.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(facts)}\n")


def metrics_files(output: Path | None, plugins: Iterable[Any]) -> dict[str, Path]:
    """Return the files to which a run appends a line for each set of metrics, by name."""
    files = {} if output is None else {"metrics.jsonl": output / "metrics.jsonl"}
    for plugin in plugins:
        if hasattr(plugin, "metrics_file") and (path := plugin.metrics_file(output)) is not None:
            files[path.name] = path
    return files


def shorten(path: Path, lines: int) -> None:
    """Remove the lines of a file after the first ``lines``."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        for _ in range(lines):
            if not file.readline():
                return
        file.truncate(file.tell())


def count_lines(path: Path) -> int:
    """Return the number of lines of a file, 0 if it does not exist."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
