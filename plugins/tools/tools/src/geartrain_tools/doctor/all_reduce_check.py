"""The check ``all_reduce``: a real all-reduce between two new processes, which meet as in a run.

``python -m geartrain_tools.doctor.all_reduce_check BACKEND DEVICE SECONDS RESULT`` runs one rank.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from geartrain.parallel import (
    ClusterEnvironment,
    Failure,
    Patience,
    Supervisor,
    bootstrap,
    describe_exit,
    detect,
    report,
)

#: Time limit of the two ranks in seconds, from their start to the end of the all-reduce.
DEADLINE = 60.0
#: Length of the float32 vector: 4 MiB. Every sum is below 2**24, so float32 holds it exactly.
NUMBERS = 2**20
#: Number of timed all-reduces.
TIMED = 5
_RANKS = 2
#: Lines of a rank's output that the report shows.
_LINES = 40


# --- the process that starts the two ranks --------------------------------------------------------


@dataclass(slots=True)
class _Rank:
    """One of the two ranks, with files in ``folder``. The pipe ``sentinel`` closes at its end."""

    number: int
    process: subprocess.Popen[bytes]
    sentinel: int
    folder: Path
    #: True if it neither failed nor ended before the deadline.
    hangs: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def error(self) -> Failure | None:
        return Failure.read(self.number, self.folder / f"error-{self.number}")

    def output(self) -> str:
        path = self.folder / f"output-{self.number}"
        return (
            "\n".join(path.read_text(errors="replace").splitlines()[-_LINES:])
            if path.exists()
            else ""
        )

    def _where(self) -> str:
        """Return the innermost frame of the main thread, from the stacks that the rank wrote."""
        _, current, stack = self.output().rpartition("Current thread")
        frame = re.search(r'File ".*?([^/"]+)", line (\d+) in (\S+)', stack)
        return f": it is in {frame[3]}, {frame[1]}:{frame[2]}" if current and frame else ""

    def why(self) -> str:
        """Return one line that says how the rank failed."""
        error, code = self.error(), self.process.returncode
        if self.hangs:
            return f"rank {self.number} did not end within {DEADLINE:g} s{self._where()}"
        if error is not None:
            return f"rank {self.number} failed: {error.message.splitlines()[0]}"
        return f"rank {self.number} {describe_exit(code)}"

    def facts(self, blamed: bool) -> dict[str, Any]:
        error = self.error()
        text = None if error is None else error.traceback
        return {
            "rank": self.number,
            "exit_code": self.process.returncode,
            "blamed": blamed,
            "error": text,
            "output": self.output(),
        }


def all_reduce(backend: str, device: str) -> dict[str, Any]:
    """Sum a known vector over two processes on this machine.

    Args:
        backend: name of a torch.distributed backend.
        device: ``"cpu"``, or ``"cuda"`` for the first two visible GPUs.

    Returns:
        ``seconds`` from start to end, ``all_reduce_ms`` (the median of several), ``mib`` (the size
        of the vector) and ``error`` (one line, or ``None``). After an error also ``ranks``: for
        each rank its exit code, ``blamed``, its whole error, and the end of its output.
    """
    from geartrain.parallel import raise_on_signals, rendezvous, sockets

    began, patience = time.monotonic(), Patience.from_environment()
    facts: dict[str, Any] = {
        "backend": backend,
        "device": device,
        "mib": NUMBERS * 4 / 2**20,
        "all_reduce_ms": None,
        "error": None,
    }
    # A signal that ends this process must not leave the ranks behind. Python runs signal handlers
    # only in the main thread.
    in_main_thread = threading.current_thread() is threading.main_thread()
    with (
        raise_on_signals() if in_main_thread else nullcontext(),
        tempfile.TemporaryDirectory(prefix="geartrain-doctor-") as folder,
    ):
        store = rendezvous.serve(sockets.bind("127.0.0.1", None), timedelta(seconds=DEADLINE))
        ranks: list[_Rank] = []
        supervisor = Supervisor(ranks, Path(folder), patience)
        try:
            with _later() if in_main_thread else nullcontext():
                for number in range(_RANKS):
                    place = ClusterEnvironment(
                        "geartrain", number, _RANKS, number, _RANKS, 0, "127.0.0.1", store.port
                    )
                    ranks.append(_start(place, backend, device, Path(folder)))
            _wait(ranks, supervisor)
        finally:
            supervisor.end()
            for rank in ranks:
                os.close(rank.sentinel)
        facts["seconds"] = round(time.monotonic() - began, 3)
        verdict = supervisor.judge()
        if blamed := [
            rank
            for rank in ranks
            if rank.hangs or (verdict is not None and rank.number in verdict.ranks)
        ]:
            facts["error"] = "; ".join(rank.why() for rank in blamed)
            facts["ranks"] = [rank.facts(rank in blamed) for rank in ranks]
        else:
            facts["all_reduce_ms"] = json.loads((Path(folder) / "result-0").read_text())["ms"]
    return facts


@contextmanager
def _later() -> Iterator[None]:
    """Delay signals that end this process until every rank is recorded and can be stopped."""
    from geartrain.parallel import SIGNALS

    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: heard.append(number))
        for number in SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if heard:
            signal.raise_signal(heard[0])


def _start(place: ClusterEnvironment, backend: str, device: str, folder: Path) -> _Rank:
    from geartrain.parallel import ERROR_FILE, variables

    number = place.rank
    # torchrun's variables, which would give the ranks another place.
    leftovers = ("TORCHELASTIC_", "GROUP_", "ROLE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(leftovers)}
    # -P: do not import files of the current folder in place of standard library modules.
    work = [
        sys.executable,
        "-P",
        "-m",
        __name__,
        backend,
        device,
        str(DEADLINE),
        str(folder / f"result-{number}"),
    ]
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            bootstrap.command(folder / f"output-{number}", work),
            env={
                **kept,
                **variables(place),
                ERROR_FILE: str(folder / f"error-{number}"),
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            pass_fds=(writing,),
            start_new_session=True,  # only this process handles Ctrl-C
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return _Rank(number, process, reading, folder)


def _wait(ranks: list[_Rank], supervisor: Supervisor) -> None:
    """Wait for both ranks until the deadline. After one fails, give the other time to fail too."""
    deadline = time.monotonic() + DEADLINE
    while (
        supervisor.running
        and not supervisor.failures
        and (remaining := deadline - time.monotonic()) > 0
    ):
        supervisor.wait(remaining)
        supervisor.look()
    if not supervisor.failures:
        supervisor.begin_end()
        for rank in ranks:
            if rank.number in supervisor.running:
                rank.hangs = True
                # The rank writes its stacks into its output, even inside a collective, and ends.
                rank.signal(signal.SIGUSR1)
    supervisor.unwind()


# --- one rank -------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Run the rank that the environment names. After an error, save it and exit with 1."""
    # chain: after the stacks are written, the signal's default action ends the process.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    backend, device, seconds, result = argv
    try:
        Path(result).write_text(
            json.dumps({"ms": _sum(backend, device, timedelta(seconds=float(seconds)))})
        )
    except BaseException as error:
        report(error)
        traceback.print_exception(error)
        sys.exit(1)


def _sum(backend: str, kind: str, timeout: timedelta) -> float:
    """Join the other rank and all-reduce; return the median time in milliseconds.

    Raises:
        TrainingError: the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    from geartrain import TrainingError
    from geartrain.parallel import nodes, rendezvous, sockets

    place = detect()
    assert place is not None
    place = nodes.with_address(place)
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, place.local_rank)
    if kind != "cpu":
        getattr(torch, kind).set_device(device)
    name = sockets.interface(place)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    store = rendezvous.run_store(place, "doctor", timeout)
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout
    )
    numbers = torch.arange(NUMBERS, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(1 + TIMED):
        summed = numbers * (place.rank + 1)
        _ready(summed)
        began = time.perf_counter()
        dist.all_reduce(summed)
        _ready(summed)
        seconds.append(time.perf_counter() - began)
        wrong = int((summed != numbers * sum(range(1, place.size + 1))).sum())
        if wrong:
            raise TrainingError(f"the all-reduce gave {wrong} wrong numbers of {NUMBERS}")
    # Rank 0 holds the store, so it must leave last.
    dist.barrier(device_ids=None if kind == "cpu" else [place.local_rank])
    dist.destroy_process_group()
    return round(sorted(seconds[1:])[TIMED // 2] * 1000, 3)


def _ready(tensor: Any) -> None:
    """Wait for the device, so that the time is the all-reduce's."""
    tensor[0].item()


if __name__ == "__main__":
    main(sys.argv[1:])
