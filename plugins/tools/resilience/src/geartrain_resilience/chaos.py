"""``chaos``: faults on purpose, for drills. Each fires once in a run, also across restarts."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import ClusterEnvironment, detect, nearest
from geartrain_parallel import sockets
from geartrain_resilience.exchange import Attempt

_LABEL = "geartrain-resilience[chaos]"
_KEYS = ("rank", "step", "seconds")
#: More bytes than any device has.
_TOO_MUCH = 2**48


class ChaosError(RuntimeError):
    """The exception of ``--chaos.exception``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind, the rank, the step in which it fires, from 1, and how long it lasts."""

    kind: str
    rank: int
    step: int
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.kind}-rank{self.rank}-step{self.step}"

    @classmethod
    def read(cls, kind: str, text: str) -> Iterator[Fault]:
        """Yield the faults that a user has typed: ``rank=1,step=50``, several with ``;``.

        Raises:
            UsageError: it cannot be read.
        """
        for part in filter(None, (part.strip() for part in str(text).split(";"))):
            given: dict[str, float] = {"rank": 0, "seconds": 5.0}
            for pair in part.split(","):
                key, _, value = (word.strip() for word in pair.partition("="))
                if key not in _KEYS:
                    raise UsageError(
                        f"{_LABEL}: {kind}={part!r} has {key!r}. {nearest(key, _KEYS)} "
                        "Fix: rank=1,step=50"
                    )
                try:
                    given[key] = float(value) if key == "seconds" else int(value)
                except ValueError:
                    message = f"{_LABEL}: {kind}={part!r}: {key} must be a number"
                    raise UsageError(f"{message}. Fix: rank=1,step=50") from None
            if given.get("step", 0) < 1 or given["rank"] < 0 or given["seconds"] <= 0:
                raise UsageError(
                    f"{_LABEL}: {kind}={part!r} must name a step from 1 and a rank from 0. "
                    "Fix: rank=1,step=50"
                )
            yield cls(kind, int(given["rank"]), int(given["step"]), given["seconds"])


class Chaos:
    """Cause faults: each option is ``"rank=1,step=50"``, several with ``;`` between them.

    A fault fires in the beginning of the step, once in a run, also if the run is started again: a
    file in the folder ``chaos`` of the run's folder says so.

    Args:
        kill: SIGKILL, as from the kernel's out-of-memory killer.
        exception: an exception.
        segfault: SIGSEGV.
        terminate: SIGTERM.
        stop: SIGSTOP.
        slow: sleep for ``seconds=5``.
        disconnect: shut down the connections to other ranks.
        out_of_memory: allocate more than the device has.
        kill_worker: SIGKILL to a worker of a loader.
        full_disk: no file can be written any more by this process.
        corrupt_checkpoint: damage the next ``last.ckpt``.

    Raises:
        UsageError: no fault is given, or one cannot be read.
    """

    def __init__(
        self,
        kill: str | None = None,
        exception: str | None = None,
        segfault: str | None = None,
        terminate: str | None = None,
        stop: str | None = None,
        slow: str | None = None,
        disconnect: str | None = None,
        out_of_memory: str | None = None,
        kill_worker: str | None = None,
        full_disk: str | None = None,
        corrupt_checkpoint: str | None = None,
    ) -> None:
        given = {name: text for name, text in locals().items() if isinstance(text, str)}
        self.faults = [fault for kind, text in given.items() for fault in Fault.read(kind, text)]
        if not self.faults:
            raise UsageError(f"{_LABEL} has no fault. Fix: --chaos.kill rank=1,step=50")
        self._waiting: list[Fault] = []
        #: The fault that damages the next ``last.ckpt``.
        self._corrupting: Fault | None = None

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if plan.output is None:
            message = f"{_LABEL} notes in the run's folder which faults have fired"
            raise UsageError(f"{message}, and it has none. Fix: --output DIR")
        ranks, steps = plan.processes, plan.options.max_steps
        for fault in self.faults:
            if ranks is not None and fault.rank >= ranks:
                last = f"the last is {ranks - 1}" if ranks > 1 else "the only one is 0"
                raise UsageError(
                    f"{_LABEL}: {fault.kind} is for rank {fault.rank}, and {last}. "
                    "Fix: another rank, or more --devices"
                )
            if 0 < steps < fault.step:
                raise UsageError(
                    f"{_LABEL}: {fault.kind} is for step {fault.step}, and max_steps={steps}. "
                    "Fix: an earlier step"
                )
            if fault.kind == "disconnect" and ranks == 1:
                raise UsageError(
                    f"{_LABEL}: disconnect needs another rank. Fix: --strategy ddp --devices 2"
                )

    @hookimpl(wrapper=True)
    def launch(self, run: Run) -> Generator[None, Any, Any]:
        attempt = Attempt.current()
        is_new = not run.plan.resumes and (attempt is None or attempt.number == 0)
        if is_new and ClusterEnvironment.starts_rank_0(detect(), run.plan.num_nodes):
            shutil.rmtree(_folder(run), ignore_errors=True)  # of a run that failed early
        return (yield)

    @hookimpl
    def on_train_start(self, run: Run) -> None:
        _folder(run).mkdir(parents=True, exist_ok=True)
        self._waiting = [
            fault
            for fault in self.faults
            if fault.rank == run.world.rank and not (_folder(run) / fault.name).exists()
        ]

    @hookimpl
    def on_train_batch_start(self, run: Run) -> None:
        for fault in list(self._waiting):
            if fault.step == run.step + 1:
                self._waiting.remove(fault)
                if fault.kind == "corrupt_checkpoint":
                    self._corrupting = fault
                    continue
                _note(fault, run)
                fire(fault, run)

    @hookimpl
    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        if self._corrupting is not None and path.name == "last.ckpt":
            _note(self._corrupting, run)
            self._corrupting = None
            damage(path)


def fire(fault: Fault, run: Run) -> None:
    """Let a fault happen in this process."""
    signals = {"kill": "SIGKILL", "segfault": "SIGSEGV", "terminate": "SIGTERM", "stop": "SIGSTOP"}
    if fault.kind in signals:
        os.kill(os.getpid(), getattr(signal, signals[fault.kind]))
    elif fault.kind == "exception":
        raise ChaosError(f"an exception on purpose, in step {fault.step} of rank {fault.rank}")
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "disconnect":
        sockets.shut_down(sockets.open_sockets())
    elif fault.kind == "out_of_memory":
        torch.empty(_TOO_MUCH, dtype=torch.uint8, device=run.device)
    elif fault.kind == "kill_worker":
        workers = multiprocessing.active_children()
        if not workers:
            raise TrainingError(
                f"{_LABEL}: kill_worker finds no worker. Fix: a loader with num_workers=1"
            )
        os.kill(workers[0].pid or 0, signal.SIGKILL)
    else:
        import resource  # not on Windows

        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))  # writes fail with EFBIG


def damage(path: Path) -> None:
    """Change bytes in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(64))


def _note(fault: Fault, run: Run) -> None:
    """Write when a fault fires, before it does."""
    (_folder(run) / fault.name).write_text(str(time.time()), encoding="utf-8")


def _folder(run: Run) -> Path:
    assert run.output is not None
    return run.output / "chaos"
