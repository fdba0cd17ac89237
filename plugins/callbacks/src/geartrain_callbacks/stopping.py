"""How callbacks end training on every rank together."""

from __future__ import annotations

import sys

from geartrain import Run


def stop_together(run: Run) -> None:
    """End training. Every rank must call this at the same place. A single rank sets ``run.should_stop`` instead.

    After an epoch's last flush ``run.should_stop`` would be seen in the next epoch; what that flush agreed on is therefore set too.
    """
    run.should_stop = run.logs.stop = True


def say(run: Run, text: str) -> None:
    """Print one line on rank 0's standard error."""
    if run.world.rank == 0:
        print(text, file=sys.stderr, flush=True)
