"""The limits of MPS: clear errors, raised as early as possible."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from geartrain import Module, Plan, Run, TrainingError, UsageError

#: Types that Metal lacks: aten/src/ATen/mps/EmptyTensor.cpp raises a TypeError for them.
_ABSENT = (torch.float64, torch.complex128)
#: geartrain's strategies that create a torch.distributed process group even for one process.
_DISTRIBUTED = ("ddp", "ddp2", "ddp_spawn", "spawn")


def refuse(plan: Plan, module: Module | type[Module]) -> None:
    """Raise for a plan that MPS cannot run.

    Args:
        plan: the plan, with precision and strategy.
        module: the user's module or its class.

    Raises:
        UsageError: float64, several processes, or a strategy that splits batches over devices.
    """
    label = plan.accelerator.label
    if plan.precision.name == "64-true":
        raise UsageError(
            f"{label}: precision 64-true needs float64, which MPS does not have. "
            "Fix: --precision 32-true, or --accelerator cpu"
        )
    if plan.precision.name == "16-mixed" and "mps" not in inspect.getsource(
        torch.amp.GradScaler.unscale_
    ):
        raise UsageError(
            f"{label}: the gradient scaler of torch {torch.__version__} needs float64, which MPS "
            "does not have. Fix: install a newer torch, or use --precision bf16-mixed or 32-true"
        )
    if plan.strategy.name == "dp":
        raise UsageError(
            f"{label}: dp splits batches over devices, but MPS has one device. "
            "Fix: --strategy single"
        )
    if (plan.processes != 1 or plan.strategy.name in _DISTRIBUTED) and not _backends():
        raise UsageError(
            f"{label}: {plan.strategy.label} needs torch.distributed, but none of its backends "
            "takes MPS tensors. "
            "Fix: --strategy single --devices 1 --num-nodes 1, or --accelerator cpu"
        )
    if isinstance(module, Module):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.dtype in _ABSENT:
                raise UsageError(
                    f"{label}: {type(module).__name__}.{name} is {_name(tensor)}, which MPS does "
                    "not have. Fix: module.float() before the run, or --accelerator cpu"
                )


def _backends() -> list[str]:
    """Return the torch.distributed backends that declare MPS tensors.

    None of torch's backends does (pytorch/pytorch#160732), but a plugin may register one. The CPU
    fallback does not work: it copies results to memory that is never read
    (pytorch/pytorch#173808).
    """
    capability = dist.Backend.backend_capability if dist.is_available() else {}
    return [name for name, devices in capability.items() if "mps" in devices]


def to_device(run: Run, batch: Any) -> Any:
    """Return a batch on the device.

    Args:
        run: the run, whose module may define its own transfer.
        batch: any nesting of tensors.

    Raises:
        TrainingError: MPS does not have the type of a tensor; the message has its place.
    """
    try:
        return run.to_device(batch)
    except TypeError as error:
        # Searched only after an error, so that a good batch has no cost.
        found = next(
            ((path, t) for path, t in _tensors("batch", batch) if t.dtype in _ABSENT), None
        )
        if found is None or "MPS" not in str(error):
            raise
        path, tensor = found
        raise TrainingError(
            f"{run.plan.accelerator.label}: {path} is {_name(tensor)}, which MPS does not have. "
            "Fix: .float() in the dataset or in the module's on_before_batch_transfer; NumPy "
            "arrays are float64 by default (use np.float32)"
        ) from error


def _tensors(path: str, item: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a batch with its path, in all collections that geartrain moves."""
    if isinstance(item, torch.Tensor):
        yield path, item
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        for name in item._fields:
            yield from _tensors(f"{path}.{name}", getattr(item, name))
    elif isinstance(item, list | tuple):
        for index, inner in enumerate(item):
            yield from _tensors(f"{path}[{index}]", inner)
    elif isinstance(item, Mapping):
        for key, inner in item.items():
            yield from _tensors(f"{path}[{key!r}]", inner)
    elif dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            yield from _tensors(f"{path}.{field.name}", getattr(item, field.name))


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def environment() -> dict[str, str]:
    """Return torch's environment variables for MPS that are set."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "PYTORCH_ENABLE_MPS_FALLBACK" or name.startswith("PYTORCH_MPS_")
    }
