"""The main function of a started process: become a rank, run the worker, return the result."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from geartrain import Run
from geartrain.parallel import (
    ClusterEnvironment,
    die_with_parent,
    join,
    report,
    threads,
    variables,
    write_output_to,
)
from geartrain_spawn.files import AnonymousFile
from geartrain_spawn.handover import Baseline, outcome
from geartrain_spawn.pickles import pickle_by_value_for_workers


@dataclass(slots=True)
class Surroundings:
    """Settings that a rank copies from its starter: the user's code may have changed them."""

    environment: dict[str, str]
    directory: str
    #: Start method of loader workers. Otherwise it would be the method that started the rank.
    start_method: str | None
    dtype: torch.dtype
    matmul_precision: str
    random: Any
    torch_random: torch.Tensor
    numpy_random: Any

    @classmethod
    def here(cls) -> Surroundings:
        numpy = sys.modules.get("numpy.random")
        return cls(
            dict(os.environ),
            os.getcwd(),
            multiprocessing.get_start_method(allow_none=True),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            random.getstate(),
            torch.get_rng_state(),
            None if numpy is None else numpy.get_state(),
        )

    def take_over(self) -> None:
        os.environ.clear()  # a forkserver has the environment of the first run
        os.environ.update(self.environment)
        os.chdir(self.directory)
        multiprocessing.set_start_method(self.start_method, force=True)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        random.setstate(self.random)
        torch.set_rng_state(self.torch_random)
        if self.numpy_random is not None:
            import numpy

            numpy.random.set_state(self.numpy_random)


@dataclass(slots=True)
class Job:
    """The task of one rank."""

    place: ClusterEnvironment
    #: Number of the run in the program.
    number: int
    timeout: timedelta
    #: The pickled run, or the run itself in a fork.
    payload: AnonymousFile | tuple[Run, Callable[[int], Any]]
    #: The file for the result or the exception.
    answer: AnonymousFile
    #: The file for the rank's output; ``None`` for the starter's output.
    log: Path | None
    #: The file for the report of the rank's error; see ``geartrain.parallel.Failure.read``.
    error_file: Path
    #: ``None`` in a fork, which inherits them.
    surroundings: Surroundings | None


#: The answer of a rank that succeeded and has no result to return.
DONE = "done"


def main(job: Job) -> None:
    """Run one rank in a new process; exit with 1 after an error."""
    die_with_starter()
    direct_output(job.log)
    run: Run | None = None
    try:
        if job.surroundings is None:
            # The starter's garbage may belong to threads that a fork lacks; collecting it would
            # abort the process.
            gc.freeze()
        else:
            job.surroundings.take_over()
            pickle_by_value_for_workers()
        os.environ.update(variables(job.place), TORCHELASTIC_ERROR_FILE=str(job.error_file))
        # After a fork, OpenMP's threads are gone and a wait for them would hang. One thread needs
        # none of them.
        torch.set_num_threads(1 if job.surroundings is None else threads(job.place.local_size))
        run, worker = job.payload.load() if isinstance(job.payload, AnonymousFile) else job.payload
        before = Baseline(run) if job.place.local_rank == 0 else None
        result = join(run, worker, job.place, job.number, job.timeout)
        job.answer.dump(DONE if before is None else outcome(run, result, before))
    except BaseException as error:
        if run is not None:
            run.hooks.explain(error, notes=False)
        # Again, because the error may come before the environment is set.
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(job.error_file)
        report(error)
        if job.log is not None:
            traceback.print_exception(error)
        with suppress(Exception):  # an error that cannot be pickled; its text is reported
            job.answer.dump(error)
        sys.exit(1)


def die_with_starter() -> None:
    """End this process when the starter ends, even if it is killed."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    assert starter.pid is not None
    if os.getppid() == starter.pid:
        die_with_parent()

    # A forkserver's child is not a child of the starter, and the server may outlive the starter.
    # Prefer the pidfd to the sentinel, which is a pipe: forked children of the starter hold its
    # other end open after the starter's death.
    ended = os.pidfd_open(starter.pid) if hasattr(os, "pidfd_open") else starter.sentinel

    def watch() -> None:
        connection.wait([ended])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="geartrain-starter", daemon=True).start()


def direct_output(log: Path | None) -> None:
    """Send the output of this rank and its libraries to its log."""
    if log is None:
        return
    write_output_to(log)
    # In a fork of a notebook, Python's streams would still write to the notebook.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
