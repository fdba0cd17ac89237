"""``--json``: one JSON object on standard output; everything else goes to standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from geartrain import Trainer
from geartrain_cli.panel import parts_of, user_lines


@contextmanager
def printed_on_stderr() -> Iterator[int]:
    """Send what this process and its children print to standard error until the block ends.

    Yields a descriptor of the standard output.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield stdout
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def print_result(command: str, trainer: Trainer) -> None:
    """Print how a run ended. NaN and infinity are strings, as in metrics.jsonl."""
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    facts = {
        "status": "done",
        "command": command,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "metrics": {n: v if math.isfinite(v) else str(v) for n, v in metrics.items()},
        "output": None if trainer.output is None else str(trainer.output),
    }
    print(json.dumps(facts))


@contextmanager
def errors_as_json(command: str) -> Iterator[None]:
    """Print an error that ends the block: message, fix, and the user's lines."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        message, action = parts_of(error)
        facts = {
            "status": "interrupted" if isinstance(error, KeyboardInterrupt) else "failed",
            "command": command,
            "error": type(error).__name__,
            "message": message,
            "fix": action,
            "lines": user_lines(error),
        }
        print(json.dumps(facts))
        raise
