"""One replica of the model per device. Replicas run in turn on the CPU, in parallel on CUDA.

With torchmetrics objects they are started in turn on CUDA as well, because all replicas update the
module's metrics.

Replicas share the parameters, so gradients accumulate in the module's parameters, as in
torch.nn.DataParallel:
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import parallel_apply, replicate

from geartrain import Run, TrainingError
from geartrain.plugin_api import StepForwarder, map_tensors, move
from geartrain_callbacks.parts.combine import combine
from geartrain_callbacks.parts.split import split
from geartrain_dp.logs import PartLogs
from geartrain_dp.metrics import PartMetrics, refuse_metrics
from geartrain_dp.watch import Watch

_MEDIA = ("log_image", "log_figure", "log_histogram", "log_text", "log_table")


def _log_nothing(*_: Any, **__: Any) -> None:
    """Take the place of ``log_image`` and the like."""


class LoadedPlugin(nn.Module):
    """The module that is replicated: its ``forward`` runs a step method on one part of a batch."""

    #: Index of the replica's part.
    index = 0
    #: The replica logs here.
    logs: PartLogs

    def __init__(self, step: StepForwarder) -> None:
        super().__init__()
        self.step = step

    def forward(self, method: str, *args: Any) -> Any:
        with self.logs.part(self.index):
            return self.step.part(method, *args)


class Replicas(nn.Module):
    """A ``StepForwarder`` that splits each batch over the devices.

    ``replicas("training_step", batch, batch_idx)`` runs one part of the batch on each device and
    returns the output that one process would return for the whole batch.

    Args:
        run: the run of this process.
        step: the module's ``StepForwarder``, on the first device when it is called.
        label: the strategy, for errors and warnings.

    Raises:
        TrainingError: several devices that are neither CPU nor CUDA, or a module that cannot be
            replicated.
    """

    def __init__(self, run: Run, step: StepForwarder, label: str) -> None:
        super().__init__()
        self.part = LoadedPlugin(step)
        self._run, self._label = run, label
        self._warned: set[str] = set()
        self._copies: dict[str, tuple[Any, Any]] = {}
        count, first = run.plan.layout.devices_per_process, run.device
        self.devices = [
            first,
            *(
                torch.device(first.type, i) if first.type != "cpu" else first
                for i in run.plan.devices[1:count]
            ),
        ]
        if count > 1:
            _check(step, first, label)
            refuse_metrics(step, label, nodes=run.world.size > 1)

    def forward(self, method: str, *args: Any) -> Any:
        if len(self.devices) == 1:
            return self.part.step(method, *args)
        batch, *others = args
        parts, sizes = split(batch, len(self.devices))
        devices = self.devices[: len(parts)]
        metrics = PartMetrics(self.part, devices)
        logs = PartLogs(self._run, sizes, metrics, self._copies)
        with logs.temporary_copies():
            replicas = self._replicate(devices, logs)
            for replica in replicas:
                metrics.put_into(replica)
            watch = Watch(replicas, metrics.modules)
            with metrics.watched():
                outputs = _apply(
                    replicas,
                    [(method, part, *others) for part in parts],
                    devices,
                    side_by_side=not metrics.modules,
                )
        watch.warn(method, self._label, self._warned)
        if self.part.step.has_end(method):
            return self.part.step.end(method, outputs)
        return combine(method, outputs, sizes)

    def _replicate(self, devices: Sequence[torch.device], logs: PartLogs) -> list[LoadedPlugin]:
        made: Sequence[nn.Module]
        if devices[0].type == "cpu":
            made = [_share(self.part, first=i == 0) for i in range(len(devices))]
        else:
            made = replicate(self.part, devices, detach=not torch.is_grad_enabled())
        replicas = [cast(LoadedPlugin, replica) for replica in made]
        for index, (replica, device) in enumerate(zip(replicas, devices, strict=True)):
            replica.index, replica.logs = index, logs
            replica_run = copy.copy(self._run)
            replica_run.device = device  # self.device of the replica
            vars(replica.step.module)["_run"] = replica_run
            if index:  # images and the like are those of the first part
                vars(replica.step.module).update(dict.fromkeys(_MEDIA, _log_nothing))
            if replica_run.world.size > 1:
                vars(replica.step.module)["all_gather"] = self._refuse_all_gather
        return replicas

    def _refuse_all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        # Nodes may have different numbers of parts, and on CUDA the parts run in parallel, so the
        # ranks' collectives would not match.
        raise TrainingError(
            f"{self._label}: self.all_gather inside a step sees a part of the batch only, and "
            "nodes may have different numbers of parts. "
            "Fix: gather in training_step_end, validation_step_end or test_step_end"
        )


def _check(step: StepForwarder, first: torch.device, label: str) -> None:
    """Raise if a device or a module cannot be replicated.

    Raises:
        TrainingError: the message names the device, or the first such module.
    """
    if first.type not in ("cpu", "cuda"):
        raise TrainingError(
            f"{label} makes replicas on cpu and cuda only, not on {first.type}. "
            "Fix: devices=1, or --strategy ddp"
        )
    for name, module in step.module.named_modules():
        name = name or type(module).__name__
        # A replica of a compiled module would still call the original. A replica of
        # torch.compile(net) would even empty the original's parameters.
        compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            message = "compiled" if compiled else "a ScriptModule"
            raise TrainingError(
                f"{label}: {name} is {message}, which cannot be replicated. "
                "Fix: use the plain module, or --strategy ddp"
            )
        if any(
            isinstance(parameter, nn.UninitializedParameter)
            for parameter in module._parameters.values()
        ):
            raise TrainingError(
                f"{label}: {name} has lazy parameters, whose shapes a replica cannot set. "
                "Fix: call the module on one batch before the fit"
            )


def _apply(
    replicas: Sequence[LoadedPlugin],
    inputs: Sequence[tuple[Any, ...]],
    devices: Sequence[torch.device],
    side_by_side: bool,
) -> list[Any]:
    """Run the replicas and return their outputs, all on the first device."""
    if devices[0].type == "cpu":
        return [replica(*arguments) for replica, arguments in zip(replicas, inputs, strict=True)]
    there = [
        tuple(move(argument, device) for argument in arguments)
        for arguments, device in zip(inputs, devices, strict=True)
    ]
    if side_by_side:
        outputs = parallel_apply(replicas, there, None, devices)
    else:  # one after another in this thread, so that metrics see the parts in order
        each = zip(replicas, there, devices, strict=True)
        outputs = [
            parallel_apply([replica], [arguments], None, [device])[0]
            for replica, arguments, device in each
        ]
    return [map_tensors(output, lambda tensor: tensor.to(devices[0])) for output in outputs]


def _share(network: nn.Module, first: bool) -> nn.Module:
    """Replicate on the CPU: same parameters; same buffers for the first replica, copies otherwise.

    ``torch.nn.parallel.replicate`` does this on CUDA.
    """
    copies = {
        module: module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for module in network.modules()
    }
    buffers = {buffer: buffer if first else buffer.clone() for buffer in network.buffers()}
    for module, replica in copies.items():
        replica._parameters = module._parameters.copy()
        replica._buffers = {
            name: None if buffer is None else buffers[buffer]
            for name, buffer in module._buffers.items()
        }
        replica._modules = {
            name: None if child is None else copies[child]
            for name, child in module._modules.items()
        }
    return cast(nn.Module, copies[network])
