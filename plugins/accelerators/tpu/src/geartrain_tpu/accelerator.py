"""The accelerator tpu: Google TPUs, with the package ``torch_tpu``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from geartrain import Plan, Run, UsageError, hookimpl
from geartrain.plugin_api import MappedBatches, warn
from geartrain_devices import TorchAccelerator

#: Set for all ranks by ``torch_tpu``; a launcher's ranks must find them.
_VARIABLES = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")


class TPUAccelerator(TorchAccelerator):
    """Train on Google TPUs, a process for each device.

    A process sees one device, whose index is 0. The chips of this machine are counted as
    ``torch_tpu`` counts them, on the PCI bus, so that no device starts before the run.

    torch counts devices in a process's first backward, and never again. If the first one is on the
    CPU, train on a TPU in another process.

    Source:
        https://github.com/google-pytorch/torch_tpu
    """

    device_type, priority = "tpu", 40
    package, install = "torch_tpu", "pip install torch_tpu, in an environment of its own"

    # --- before a run: nothing starts a device ----------------------------------------------------

    @classmethod
    def device_count(cls) -> int:
        """Return the number of TPU devices of this machine."""
        return int(_torch_tpu("utils.hardware").get_tpu_device_count())

    @classmethod
    def unavailable(cls) -> str | None:
        """Return why no TPU can be used here, or ``None``."""
        if find_spec(cls.package) is None:
            return super().unavailable()
        if cls.device_count():
            return None
        return "there is no TPU on this machine's PCI bus. Fix: --accelerator cpu"

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """Return ``index`` and ``name`` of each device."""
        name = _torch_tpu("utils.hardware").get_tpu_device_name()
        return [{"index": index, "name": name} for index in range(cls.device_count())]

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        """Refuse numbers of devices that the chips cannot form, and ranks without their variables.

        Raises:
            UsageError: in these cases, and for a strategy with several devices in a process.
        """
        super().check_plan(plan)
        count = plan.layout.processes_per_node or 1
        try:
            _torch_tpu("utils.hardware").get_tpu_topology(count)
        except RuntimeError as error:
            message = (
                f"{plan.accelerator.label}: {count} devices of this TPU form no mesh ({error})"
            )
            raise UsageError(f"{message}. Fix: --devices 1, 4 or 8") from error

    @hookimpl(wrapper=True)
    def launch(self, run: Run) -> Generator[None, Any, Any]:
        """Set torch_tpu's variables, which must be equal in all ranks, before ranks start.

        Raises:
            UsageError: a launcher has started the ranks without them.
        """
        if run.plan.processes != 1:
            missing = [name for name in _VARIABLES if name not in os.environ]
            if run.cluster is None:
                count = run.plan.layout.processes_per_node
                _torch_tpu("distributed.distributed").set_tpu_launch_env(
                    nnodes=run.plan.num_nodes, nproc_per_node=count
                )
                # It keeps what the first run of this process has set.
                ranks = os.environ[_VARIABLES[0]].count(",") + 1
                if ranks != run.plan.processes:
                    message = f"{run.plan.accelerator.label}: torch_tpu is set up for {ranks} ranks"
                    raise UsageError(f"{message}. Fix: start {run.plan.processes} in a new process")
            elif missing:
                message = f"{run.plan.accelerator.label}: the launcher's ranks have no {missing[0]}"
                command = "python -m torch_tpu._internal.distributed.distributed"
                hint = f'eval "$({command})" and export the variables before the launcher'
                raise UsageError(f"{message}. Fix: {hint}")
        return (yield)

    # --- in each process --------------------------------------------------------------------------

    def index_of(self, run: Run, local_rank: int) -> int:
        return 0  # of the only device that a process sees

    def start(self, index: int) -> torch.device:
        # torch_tpu registers the type at its import only if it has counted a TPU.
        import_module("torch_tpu._loader")._init_device(self.device_type)
        # A checkpoint has the state of the device's generator.
        warnings.filterwarnings("ignore", ".*'default_generators' is experimental")
        device = torch.device(self.device_type, index)
        torch.zeros(1, device=device)
        return device

    @hookimpl
    def device_batches(self, run: Run, loader: Iterable[Any]) -> Iterator[Any]:
        if getattr(loader, "pin_memory", False):
            warn(f"{run.plan.accelerator.label} cannot pin memory. Fix: pin_memory=False")
            loader.pin_memory = False  # type: ignore[attr-defined]
        return MappedBatches(iter(loader), loader, run.to_device)


def _torch_tpu(name: str) -> Any:
    return import_module(f"torch_tpu._internal.{name}")
