"""A plugin in a file: saves every step, and kills its process once. ``verify resume`` adds it."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

from geartrain import Run, hookimpl

#: The environment variable with the step after which to kill; 0 or unset for never.
KILL_AFTER = "GEARTRAIN_KILL_AFTER"


class EveryStep:
    """Save ``steps/N.ckpt`` in the run's folder after step N; kill one rank after a step."""

    @hookimpl(wrapper=True)
    def on_step_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        assert run.output is not None
        run.save_checkpoint(run.checkpoint(run.epoch), run.output / "steps" / f"{run.step}.ckpt")
        if run.step == int(os.environ.get(KILL_AFTER, "0")):
            run.hooks.barrier(run=run)  # so that the file is complete
            if run.world.rank == run.step % run.world.size:
                os.kill(os.getpid(), signal.SIGKILL)
        return results
