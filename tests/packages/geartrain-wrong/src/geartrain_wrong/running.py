"""Errors in starting, watching and ending ranks."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from geartrain import hookimpl
from geartrain.parallel import launch
from geartrain_wrong.plain import Plain


class ForgetsCounters(Plain):
    """After ``fit`` the caller's counters have their old values."""

    @hookimpl
    def launch(self, run, worker):
        result = launch(run, worker, self.timeout)
        if run.command == "fit":
            run.step = run.epoch = 0
        return result


class DropsPlugins(Plain):
    """Plugins given as objects exist only on rank 0."""

    @hookimpl
    def setup_process_group(self, run):
        world = super().setup_process_group(run)
        for plugin in run.hooks.manager.get_plugins():
            if world.rank and type(plugin).__name__ == "FromObject":
                run.hooks.manager.unregister(plugin)
        return world


class NeverAlone(Plain):
    """A second rank is assumed to exist."""

    @hookimpl
    def setup_process_group(self, run):
        world = super().setup_process_group(run)
        assert world.size > 1
        return world


class StaysInItsGroup(Plain):
    """The process group is never left, so the next run finds it.

    It is destroyed at exit, because its threads sometimes abort the program.
    """

    @hookimpl
    def setup_process_group(self, run):
        if dist.is_initialized():
            dist.destroy_process_group()
        return super().setup_process_group(run)

    @hookimpl
    def teardown_process_group(self):
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


class Leaves(Plain):
    """A process, a file or shared memory is left behind.

    Args:
        what: ``"process"``, ``"file"`` or ``"shared memory"``.
        timeout: as in every strategy here.
    """

    done = False

    def __init__(self, what: str = "process", timeout: float = 60.0) -> None:
        super().__init__(timeout)
        self.what = what

    @hookimpl
    def on_run_end(self, run):
        if run.world.rank or Leaves.done:
            return
        Leaves.done = True
        if self.what == "process":
            subprocess.Popen(
                [sys.executable, "-c", "import threading; threading.Event().wait()"],
                start_new_session=True,
            )
        elif self.what == "file":
            os.close(tempfile.mkstemp(prefix="wrong-")[0])
        else:
            Path(f"/dev/shm/geartrain-wrong-{os.getpid()}").write_text("left")


class Untyped(Plain):
    """An option has no type annotation."""

    def __init__(self, depth=3, timeout: float = 60.0) -> None:
        super().__init__(timeout)


class OneNodeOnly(Plain):
    """Several nodes are accepted, but nothing is reduced between them."""

    @hookimpl
    def reduce_gradients(self, run):
        if run.plan.num_nodes == 1:
            super().reduce_gradients(run)


class ListensEverywhere(Plain):
    """A port is open on every network interface."""

    @hookimpl
    def setup_process_group(self, run):
        self.port = socket.create_server(("0.0.0.0", 0))
        return super().setup_process_group(run)

    @hookimpl
    def teardown_process_group(self):
        self.port.close()
        dist.destroy_process_group()


class DiesAtOnce(Plain):
    """A failed rank exits before its teardown, without a message."""

    @hookimpl
    def on_exception(self):
        os._exit(3)


class Swallows(Plain):
    """An error on one rank does not fail the run."""

    @hookimpl
    def launch(self, run, worker):
        try:
            return launch(run, worker, self.timeout)
        except Exception as error:
            os.write(2, f"rank {run.world.rank}: {error}\n".encode())
            os._exit(0)


class WaitsForEver(Plain):
    """The option ``timeout`` is never used."""

    def __init__(self, timeout: float = 60.0) -> None:
        super().__init__()
        self.timeout = timedelta(hours=1)
