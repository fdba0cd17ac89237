"""Run one cell of ``failure_cells.py``: two epochs, with an event in the middle of the second.

    cell.py STRATEGY LOADER START EVENT RANK [--output] [--spawn-method METHOD]

Files in the folder ``marks`` record the run: ``event`` has the time of the event, ``except-RANK``
has the error that the caller of ``fit`` got, ``finally-RANK`` a line for its ``finally``.
"""

import argparse
import faulthandler
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import geartrain as gt

#: The message of the error in the user's code.
OWN = "the user's own error"
#: Batches of an epoch: so many that loader workers still prefetch after the event.
BATCHES = 16
#: The batch of the second epoch in which the event happens.
MIDDLE = 5
#: The signal that makes a process print its stack. Processes without a handler ignore it.
SHOW_STACK = signal.SIGWINCH


class OwnError(Exception):
    """The error that the user's code raises."""


def mark(what: str, text: str = "") -> None:
    """Append a line to a marker."""
    with open(f"marks/{what}", "a") as file:
        file.write(f"{os.getpid()} {text}\n")


def mark_event() -> None:
    """Write the time of the event. Only the first process writes it."""
    temporary = f"marks/event.{os.getpid()}"
    Path(temporary).write_text(str(time.time()))
    with suppress(FileExistsError):
        os.link(temporary, "marks/event")
    os.unlink(temporary)


def wait_for_signal(ready) -> None:
    ready.send(None)
    signal.pause()


def use_processes() -> None:
    """Start processes as user code does. The rank's supervision must not affect them.

    Raises:
        RuntimeError: the exit code of a process is wrong.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe()
    ends, waits = fork.Process(target=int), fork.Process(target=wait_for_signal, args=(sender,))
    for process in (ends, waits):
        process.start()
    receiver.recv()
    waits.terminate()
    for process in (ends, waits):
        process.join()
    if (ends.exitcode, waits.exitcode) != (0, -signal.SIGTERM):
        raise RuntimeError(
            f"exit codes of processes in training_step: {ends.exitcode}, {waits.exitcode}"
        )


class Faults:
    """Causes the event in the right step and on the right rank.

    Args:
        parts: the process's number of devices. Under dp, each device counts as a rank.
    """

    def __init__(self, event: str, rank: int, parts: int, is_dp: bool) -> None:
        self.event, self.rank, self.parts, self.is_dp = event, rank, parts, is_dp

    def is_here(self, index: int) -> bool:
        """True if this is the rank of the event; under dp, if its device gets the sample."""
        return (
            (index // 2) % 2 == self.rank
            if self.is_dp
            else os.environ.get("RANK", "0") == str(self.rank)
        )

    def in_sample(self, index: int) -> None:
        if self.event == "sample" and os.path.exists("marks/armed") and self.is_here(index):
            mark_event()
            raise OwnError(OWN)

    def in_step(self, epoch: int, batch_idx: int, index: int) -> None:
        if epoch == 0 and batch_idx == 0:
            use_processes()
        if epoch == 1 and batch_idx == MIDDLE - 2 and self.event == "sample":
            Path("marks/armed").touch()
        if epoch == 1 and batch_idx == BATCHES - 1 and self.event == "success":
            mark_event()
        if epoch != 1 or batch_idx != MIDDLE or not self.is_here(index):
            return
        if self.event in ("step", "exit", "kill"):
            mark_event()
        if self.event == "step":
            raise OwnError(OWN)
        if self.event == "exit":
            os._exit(0)
        if self.event == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


class Samples(Dataset):
    def __init__(self, faults: Faults, length: int) -> None:
        self.faults, self.length = faults, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        self.faults.in_sample(index)
        return torch.full((4,), float(index) / self.length), index


class Model(gt.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.faults = faults

    def setup(self, stage: str) -> None:
        faulthandler.register(SHOW_STACK)  # a rank of ddp_spawn does not run main()

    def training_step(self, batch, batch_idx):
        x, index = batch
        self.faults.in_step(self.trainer.current_epoch, batch_idx, int(index[0]))
        loss = self.net(x).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("strategy", "loader", "start", "event"):
        parser.add_argument(name)
    parser.add_argument("rank", type=int)
    parser.add_argument("--output", action="store_true")
    parser.add_argument("--spawn-method", default="forkserver")
    cell = parser.parse_args()
    faulthandler.register(SHOW_STACK)
    os.makedirs("marks", exist_ok=True)
    torch.set_num_threads(1)

    is_dp, is_ddp2 = cell.strategy == "dp", cell.strategy == "ddp2"
    options = {"stall_timeout" if cell.strategy == "horovod" else "timeout": 60.0}
    if cell.strategy == "ddp_spawn":
        options["start_method"] = cell.spawn_method
    batch_size = 4 if is_dp or is_ddp2 else 2
    data = Samples(
        Faults(cell.event, cell.rank, 2, is_dp), BATCHES * batch_size * (1 if is_dp else 2)
    )
    workers = int(cell.loader.rstrip("p"))
    loader = DataLoader(
        data,
        batch_size,
        num_workers=workers,
        persistent_workers=cell.loader.endswith("p"),
        multiprocessing_context=cell.start if workers else None,
    )
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy=cell.strategy,
        strategy_options=None if is_dp else options,
        devices=2,
        num_nodes=2 if is_ddp2 else 1,
        max_epochs=2,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        output="run" if cell.output else None,
        seed=1,
    )
    rank = os.environ.get("RANK", os.environ.get("NODE_RANK", "0"))
    try:
        trainer.fit(Model(data.faults), loader)
    except BaseException as error:
        mark(f"except-{rank}", repr(f"{type(error).__name__}: {error}"))
        raise
    finally:
        mark(f"finally-{rank}")


if __name__ == "__main__":
    # Imported, because loader workers of a rank of ddp_spawn cannot import __main__'s classes.
    import cell

    cell.main()
