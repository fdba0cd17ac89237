"""Wrong in how ranks are started, watched and left."""

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
    """After ``fit`` the caller's counters are what they were before."""

    @hookimpl
    def launch(self, run, worker):
        result = launch(run, worker, self.timeout)
        if run.command == "fit":
            run.step = run.epoch = 0
        return result


class DropsPlugins(Plain):
    """Plugins that were given as objects stay with rank 0."""

    @hookimpl
    def setup_process_group(self, run):
        world = super().setup_process_group(run)
        for plugin in run.hooks.manager.get_plugins():
            if world.rank and type(plugin).__name__ == "FromObject":
                run.hooks.manager.unregister(plugin)
        return world


class NeverAlone(Plain):
    """Takes it that there is another rank."""

    @hookimpl
    def setup_process_group(self, run):
        world = super().setup_process_group(run)
        assert world.size > 1
        return world


class StaysInItsGroup(Plain):
    """Never leaves its process group; the next run finds it. At exit the group is destroyed, because its threads sometimes abort."""

    @hookimpl
    def setup_process_group(self, run):
        if dist.is_initialized():
            dist.destroy_process_group()
        return super().setup_process_group(run)

    @hookimpl
    def teardown_process_group(self):
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


class Leaves(Plain):
    """Leaves something behind.

    Args:
        what: ``"process"``, ``"file"`` or ``"shared memory"``.
        timeout: as for every strategy here.
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
    """Nobody knows what its option is."""

    def __init__(self, depth=3, timeout: float = 60.0) -> None:
        super().__init__(timeout)


class OneNodeOnly(Plain):
    """Takes several nodes, and reduces within none of them."""

    @hookimpl
    def reduce_gradients(self, run):
        if run.plan.num_nodes == 1:
            super().reduce_gradients(run)


class ListensEverywhere(Plain):
    """Opens a port to the world."""

    @hookimpl
    def setup_process_group(self, run):
        self.port = socket.create_server(("0.0.0.0", 0))
        return super().setup_process_group(run)

    @hookimpl
    def teardown_process_group(self):
        self.port.close()
        dist.destroy_process_group()


class DiesAtOnce(Plain):
    """A rank that fails is gone before it is torn down, and says nothing."""

    @hookimpl
    def on_exception(self):
        os._exit(3)


class Swallows(Plain):
    """An error of one rank is no reason to fail."""

    @hookimpl
    def launch(self, run, worker):
        try:
            return launch(run, worker, self.timeout)
        except Exception as error:
            os.write(2, f"rank {run.world.rank}: {error}\n".encode())
            os._exit(0)


class WaitsForEver(Plain):
    """Has an option ``timeout``, and never uses it."""

    def __init__(self, timeout: float = 60.0) -> None:
        super().__init__()
        self.timeout = timedelta(hours=1)
