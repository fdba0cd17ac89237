"""Functions that end training on every rank together."""

from __future__ import annotations

import sys

from geartrain import Run


def stop_together(run: Run) -> None:
    """End training. Every rank must call this at the same place; otherwise set ``run.should_stop``.

    After an epoch's last flush, ranks would read ``run.should_stop`` only in the next epoch.
    Therefore also set ``run.logs.stop``, on which that flush agreed.
    """
    run.should_stop = run.logs.stop = True


def ends(run: Run) -> str:
    """Return a sentence on the end of training, for a part that asks for it."""
    options = run.plan.options
    if run.epoch + 1 < (options.min_epochs or 0) or run.step < (options.min_steps or 0):
        return "Training ends when it has reached min_epochs and min_steps."
    return f"Training ends in epoch {run.epoch + 1}, after {run.step} steps."


def say(run: Run, text: str) -> None:
    """Print one line on rank 0's standard error."""
    if run.world.rank == 0:
        print(text, file=sys.stderr, flush=True)
