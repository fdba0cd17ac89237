"""The Plan: accelerator, devices, strategy, processes, precision, batch sizes and plugins."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from geartrain.errors import UsageError
from geartrain.hooks.plugin_info import LoadedPlugin, PluginInfo

if TYPE_CHECKING:
    from pathlib import Path

    from geartrain.hooks.manager import Hooks
    from geartrain.options import Options


#: Single hooks whose defaults are right for one process only.
_OF_SEVERAL_PROCESSES = (
    *("launch", "setup_process_group", "make_coordinator", "shard_dataloader", "wrap_model"),
    *("log_sync", "all_gather", "broadcast", "barrier", "teardown_process_group"),
)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request that a strategy plans processes for."""

    accelerator: str
    #: Device indices on each node.
    devices: tuple[int, ...]
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Processes on each node, and devices in each process."""

    #: ``None`` if a launcher decides, as horovodrun does.
    processes_per_node: int | None
    devices_per_process: int = 1
    #: Consecutive processes that have parts of one model, and so see the same data.
    model_parallel_size: int = 1

    def is_whole(self) -> bool:
        """True if these are whole numbers above 0."""
        processes = 1 if self.processes_per_node is None else self.processes_per_node
        numbers = (self.devices_per_process, self.model_parallel_size, processes)
        return all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers)


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions that are made before anything starts."""

    accelerator: PluginInfo
    #: Device indices on each node.
    devices: tuple[int, ...]
    strategy: PluginInfo
    layout: Layout
    num_nodes: int
    precision: PluginInfo
    plugins: tuple[PluginInfo, ...]
    #: Label of an installed plugin that was not selected -> why.
    passed_over: Mapping[str, str]
    options: Options
    #: Samples in one batch of the training loader; ``None`` until the loader is known.
    loader_batch_size: int | None = None
    #: The module's arguments and, as ``data.NAME``, the DataModule's. Empty until they are known.
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    #: The run's folder, or ``None``. A plugin that writes there reads it in ``check_plan``.
    output: Path | None = None
    #: True if ``fit`` resumes a run that stopped, and continues the files of that run.
    resumes: bool = False
    #: True if it is for hardware that this machine lacks: it can be explained, but not run, so a
    #: plugin must not refuse it for missing hardware.
    assumed: bool = False
    #: Changes by the strategy that users must know, from its method ``notes(plan)``: what -> how.
    notes: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def hyperparameters_of(module: Any, data: Any = None) -> dict[str, Any]:
        """Return a module's ``hparams``, and its data's as ``data.NAME``, as JSON can hold them."""
        found = dict(getattr(module, "hparams", {}))
        found |= {f"data.{name}": value for name, value in getattr(data, "hparams", {}).items()}
        return {name: _as_json(value) for name, value in found.items()}

    @property
    def processes(self) -> int | None:
        """Processes over all nodes; ``None`` if a launcher decides."""
        per_node = self.layout.processes_per_node
        return None if per_node is None else per_node * self.num_nodes

    @property
    def per_device_batch(self) -> int | None:
        """Samples that one device sees in one micro-batch, at most."""
        size, k = self.loader_batch_size, self.layout.devices_per_process
        return None if size is None else -(-size // k)

    @property
    def global_batch(self) -> int | None:
        """Samples that one optimizer step sees, over all processes and micro-batches."""
        if self.loader_batch_size is None or self.processes is None:
            return None
        data_size = self.processes // self.layout.model_parallel_size
        return self.loader_batch_size * data_size * self.options.accumulate_grad_batches

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as in ``plan.json`` and ``explain --json``."""
        options = asdict(self.options)
        if isinstance(options["val_check_interval"], timedelta):
            options["val_check_interval"] = str(options["val_check_interval"])
        return {
            "accelerator": self.accelerator.as_dict(),
            "devices": list(self.devices),
            "strategy": self.strategy.as_dict(),
            "processes": self.processes,
            "nodes": self.num_nodes,
            "precision": self.precision.as_dict(),
            "batch_size": {"per_device": self.per_device_batch, "global": self.global_batch},
            "plugins": [choice.as_dict() for choice in self.plugins],
            "passed_over": dict(self.passed_over),
            "notes": dict(self.notes),
            "options": options,
            "hyperparameters": dict(self.hyperparameters),
        }


def make_plan(
    hooks: Hooks,
    *,
    accelerator: PluginInfo,
    strategy: LoadedPlugin,
    devices: tuple[int, ...],
    num_nodes: int,
    **decisions: Any,
) -> Plan:
    """Ask the strategy for its processes and make the plan."""
    layout = hooks.plan_processes(request=PlanRequest(accelerator.name, devices, num_nodes))
    if not isinstance(layout, Layout) or not layout.is_whole():
        owner = hooks.owner("plan_processes")
        raise UsageError(
            f"{owner.label if owner else 'geartrain'}: plan_processes returned {layout!r}. Fix: "
            "return geartrain.Layout(processes_per_node, devices_per_process), of whole numbers "
            "above 0"
        )
    plan = Plan(
        accelerator=accelerator,
        strategy=strategy.info,
        devices=devices,
        num_nodes=num_nodes,
        layout=layout,
        **decisions,
    )
    notes = getattr(strategy.plugin, "notes", None)
    return replace(plan, notes=notes(plan)) if callable(notes) else plan


def check_joins(plan: Plan, hooks: Hooks) -> None:
    """Refuse a strategy of several processes that leaves a hook to core's default for one process.

    Raises:
        UsageError: it never joins the processes, or lacks the hooks with which they work together.
    """
    if plan.processes == 1:
        return
    owners = {hook: hooks.owner(hook) for hook in _OF_SEVERAL_PROCESSES}
    missing = [hook for hook, owner in owners.items() if owner is None or owner.kind == "default"]
    count = "as many" if plan.processes is None else plan.processes
    plans = f"{plan.strategy.label} plans {count} processes"
    plans += " as its launcher starts" if plan.processes is None else ""
    if "setup_process_group" in missing:
        raise UsageError(
            f"{plans} but has no setup_process_group: each would train alone. Fix: join them "
            "there, or plan_processes with Layout(1, devices_per_process), or devices=1"
        )
    if missing:
        raise UsageError(
            f"{plans} and does not implement {', '.join(missing)}. Fix: extend geartrain.parallel."
            "ProcessGroupStrategy (pip install geartrain-parallel), or implement them"
        )


def _as_json(value: Any) -> Any:
    """Return a value as JSON can hold it; an object as its type: a repr may read a GPU's memory."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    # Of a builtin the module may be None.
    return ".".join(filter(None, (named.__module__, named.__qualname__)))
