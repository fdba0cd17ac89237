"""Bring the results of a run from the rank back to the process that called ``fit``.

A run travels to a rank as the pickle of (run, worker). Everything that a caller sees after a run in
one process comes back: the module's tensors, the objects to which the module and the user's plugins
lead, optimizer state, other plugins' state, counters, metrics and the result.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import DataLoader, Dataset

from geartrain.plugin_api import LoadedPlugin, load_optimizer, map_tensors, warn
from geartrain_spawn.objects import RankObjects, has_storage, is_users, reachable, restore

if TYPE_CHECKING:
    from geartrain import Run

#: Objects of these classes, which may be large, stay in the rank.
_DATA = (Dataset, DataLoader)
#: Fields of a run and of its logs that the caller sees afterwards.
_FIELDS = (
    "step",
    "epoch",
    "batch_idx",
    "loop.batches_seen",
    "stage",
    "should_stop",
    "loop.reported",
    "stages",
    "world",
)
_LOGS = ("logged", "prog_bar", "stop")


@dataclass(frozen=True, slots=True)
class RankResult:
    """The results of a rank in another process; everything is on the CPU."""

    result: Any
    fields: dict[str, Any]
    logs: dict[str, Any]
    #: Parameters and buffers that existed before the run, by name.
    tensors: dict[str, torch.Tensor]
    #: Of :meth:`RankObjects.state`, with the memory of tensors.
    objects: bytes
    memory: list[Any]
    datamodule: dict[str, Any]
    #: The ``state_dict()`` of each optimizer and of each scheduler.
    optimizers: list[Any]
    schedulers: list[Any]
    #: The ``state_dict()`` of each plugin, or its plain attributes if it has no such method.
    plugins: list[Any]


class Baseline:
    """The module's tensors, and the objects of a run, before a rank begins.

    Args:
        run: as it came from the caller.
    """

    def __init__(self, run: Run) -> None:
        self.tensors = _tensors(run.module)
        self._by_name = set(map(id, self.tensors.values()))
        self.objects = RankObjects(run, self._sent, _DATA)

    def _sent(self) -> set[int]:
        """Add the memory of now to that of before, which may have been on another device."""
        memory = (tensor.untyped_storage() for tensor in filter(has_storage, self.tensors.values()))
        self._by_name.update(map(id, memory))
        return self._by_name


def outcome(run: Run, result: Any, before: Baseline) -> RankResult:
    """Return everything that this rank sends back after its run; move the module to the CPU.

    Args:
        run: the run that ended.
        result: the worker's result.
        before: made before the worker was called.
    """
    run.module.cpu()
    datamodule, memory = run.trainer.datamodule, list[Any]()
    return RankResult(
        result=map_tensors(result, _to_cpu),
        fields={name: attrgetter(name)(run) for name in _FIELDS},
        logs={name: getattr(run.logs, name) for name in _LOGS},
        tensors={
            name: _to_cpu(tensor).requires_grad_(tensor.requires_grad)
            for name, tensor in before.tensors.items()
        },
        objects=before.objects.state(memory),
        memory=memory,
        datamodule={} if datamodule is None else _plain_attributes(datamodule),
        optimizers=[map_tensors(optimizer.state_dict(), _to_cpu) for optimizer in run.optimizers],
        schedulers=[
            map_tensors(schedule.scheduler.state_dict(), _to_cpu) for schedule in run.schedulers
        ],
        plugins=[_plugin_state(part) for part in _plugins(run)],
    )


def apply_result(run: Run, brought: RankResult) -> Any:
    """Set the caller's module, plugins, trainer and run as if the run had been in this process.

    All tensors of ``brought`` are copied: they may be in a mapped file, and one kept tensor would
    keep the whole file.

    Returns:
        The worker's result.
    """
    for name, value in brought.fields.items():
        home, _, field = name.rpartition(".")
        setattr(attrgetter(home)(run) if home else run, field, value)
    run.device = torch.device("cpu")
    run.reset_logs()
    for name, value in brought.logs.items():
        setattr(run.logs, name, value)
    _update_module(run, brought)
    if run.trainer.datamodule is not None:
        _set(run.trainer.datamodule, _copy(brought.datamodule))
    for part, state in zip(_plugins(run), brought.plugins, strict=True):
        if part.state() is not None:
            part.plugin.load_state_dict(_copy(state))
        else:
            _set(part.plugin, _copy(state))
    if brought.optimizers:
        _make_optimizers(run, brought)
    return _copy(brought.result)


def _update_module(run: Run, brought: RankResult) -> None:
    objects, tensors = dict(reachable(run, _DATA)), _tensors(run.module)
    with torch.no_grad():
        for name, received in brought.tensors.items():
            kept = tensors[name]
            if isinstance(kept, UninitializedParameter | UninitializedBuffer):
                kept.materialize(received.shape, dtype=received.dtype)
            if kept.shape == received.shape and kept.dtype == received.dtype:
                kept.copy_(received)
            else:
                kept.data = received.clone()  # the run resized it
            kept.requires_grad_(received.requires_grad)
    try:
        restore(objects, brought.objects, map(bytearray, brought.memory))
    except Exception as error:  # which must not lose the trained weights
        warn(f"the objects of the module and of plugins are as before the run: {error}")


def _set(thing: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        thing.__dict__[name] = value  # not through a property or a __setattr__, as it was read


def _make_optimizers(run: Run, brought: RankResult) -> None:
    """Create the caller's optimizers, with the state of the rank's."""
    module = run.module
    module._attach(run)
    try:
        run.optimizers = run.make_optimizers()
        for optimizer, state in zip(run.optimizers, brought.optimizers, strict=True):
            load_optimizer(optimizer, _copy(state))
        for schedule, state in zip(run.schedulers, brought.schedulers, strict=True):
            schedule.scheduler.load_state_dict(_copy(state))
    except Exception as error:  # an error here must not lose the trained weights
        warn(
            f"the optimizers' state is lost: {type(module).__name__}.configure_optimizers failed "
            f"in the calling process ({type(error).__name__}: {error})"
        )
    finally:
        module._attach(None)


# --- the objects that travel ----------------------------------------------------------------------


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; one that is shared has several names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _plain_attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes that are numbers, strings, tensors, arrays, or collections of them."""
    return {
        name: map_tensors(value, _to_cpu) for name, value in vars(thing).items() if _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, nn.Parameter):
        return False
    if (
        value is None
        or type(value) in (bool, int, float, complex, str, bytes, torch.Tensor)
        or type(value).__module__ == "numpy"
    ):
        return True
    if type(value) in (dict, OrderedDict, Counter):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in (list, tuple, set, frozenset) and all(map(_is_plain, value))


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _copy(thing: Any) -> Any:
    return map_tensors(thing, torch.clone)


def _plugins(run: Run) -> list[LoadedPlugin]:
    return [part for part in run.hooks.parts if part.info.kind == "plugin"]


def _plugin_state(part: LoadedPlugin) -> Any:
    state = part.state()
    if state is not None:
        return state
    # The user's come back as objects; others with slots have no attributes.
    return (
        _plain_attributes(part.plugin)
        if hasattr(part.plugin, "__dict__") and not is_users(part)
        else {}
    )
