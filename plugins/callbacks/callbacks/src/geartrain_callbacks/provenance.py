"""``provenance``: how a run was started and when its steps were done, for ``geartrain report``.

Each ``fit`` with ``output=DIR`` selects it.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from geartrain import Run, hookimpl
from geartrain.plugin_api import AppendedFile

#: Seconds between two lists, at least, and for which git may look.
_BETWEEN, _PATIENCE = 0.2, 2.0


class Provenance:
    """Write ``provenance.jsonl`` in the run's folder. Rank 0 writes.

    An object is written each time a ``fit`` starts or resumes: command, working directory, date,
    host, commit of the working directory, and the number of parameters. A list is a step and the
    seconds since that start, written with logged metrics.
    """

    errors_are_warnings = True

    def __init__(self) -> None:
        self._file: AppendedFile | None = None
        self._started = self._written = 0.0

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Write the line of this start."""
        self._file = None
        if run.world.rank != 0 or run.output is None or run.command != "fit":
            return
        self._started, self._written = time.monotonic(), -_BETWEEN
        self._file = AppendedFile(run.output / "provenance.jsonl")
        self._file.append(f"{json.dumps({**_facts(), **_parameters(run)})}\n".encode())

    @hookimpl
    def log_metrics(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        """Write the time of a step."""
        if self._file is not None:
            seconds = time.monotonic() - self._started
            if seconds - self._written >= _BETWEEN:
                self._written = seconds
                self._file.append(f"[{step}, {seconds:.2f}]\n".encode())

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        """Write the time of the last step."""
        if self._file is not None:
            seconds = time.monotonic() - self._started
            self._file.append(f"[{run.step}, {seconds:.2f}]\n".encode())
        self._close()

    @hookimpl
    def on_exception(self, run: Run, error: BaseException) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _facts() -> dict[str, Any]:
    program = Path(sys.argv[0] or "python")
    is_script = program.suffix == ".py"
    words = ["python", *sys.argv] if is_script else [program.stem, *sys.argv[1:]]
    commit = _git("rev-parse", "--short=12", "HEAD")
    facts: dict[str, Any] = {
        "command": shlex.join(words),
        "directory": str(Path.cwd()),
        "started": datetime.now().astimezone().isoformat(" ", "seconds"),
        "host": socket.gethostname(),
    }
    if commit:
        changes = _git("status", "--porcelain", "--untracked-files=no")
        facts |= {"commit": commit, "uncommitted_changes": bool(changes)}
    return facts


def _git(*arguments: str) -> str:
    """Return what git prints about the working directory; nothing without git or a repository."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _parameters(run: Run) -> dict[str, int]:
    from torch.nn.parameter import is_lazy  # not above: plugins are listed without torch

    parameters = [p for p in run.module.parameters() if not is_lazy(p)]
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }
