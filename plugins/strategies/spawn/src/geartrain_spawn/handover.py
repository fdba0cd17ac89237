"""Bring the results of a run from the rank back to the process that called ``fit``.

A run travels to a rank as the pickle of (run, worker). Everything that a caller sees after a run in
one process comes back: the module's tensors and plain attributes, optimizer state, plugins' state,
counters, metrics and the result.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from geartrain.plugin_api import LoadedPlugin, load_optimizer, map_tensors, warn

if TYPE_CHECKING:
    from geartrain import Module, Run

#: nn.Module's entries of a module's ``__dict__``, except the two that travel as attributes.
_OWN = frozenset(vars(nn.Module())) - {"training", "_non_persistent_buffers_set"}
_REGISTERED = ("_modules", "_parameters", "_buffers")
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
    #: Parameters and buffers by name.
    tensors: dict[str, torch.Tensor]
    #: Modules, parameters and buffers that the run added, by the path of their module.
    added: dict[str, dict[str, dict[str, Any]]]
    #: Plain attributes by the path of their module.
    attributes: dict[str, dict[str, Any]]
    datamodule: dict[str, Any]
    #: The ``state_dict()`` of each optimizer and of each scheduler.
    optimizers: list[Any]
    schedulers: list[Any]
    #: The ``state_dict()`` of each plugin, or its plain attributes if it has no such method.
    plugins: list[Any]


def registered_names(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's submodules, parameters and buffers; its own name is ``""``."""
    tensors = [
        name
        for name, _ in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    ]
    return frozenset(
        [*tensors, *(name for name, _ in module.named_modules(remove_duplicate=False))]
    )


def outcome(run: Run, result: Any, known: frozenset[str]) -> RankResult:
    """Return everything that this rank sends back after its run; move the module to the CPU.

    Args:
        run: the run that ended.
        result: the worker's result.
        known: :func:`registered_names` of the module, before the worker was called.
    """
    module = run.module.cpu()
    datamodule = run.trainer.datamodule
    return RankResult(
        result=map_tensors(result, _to_cpu),
        fields={name: attrgetter(name)(run) for name in _FIELDS},
        logs={name: getattr(run.logs, name) for name in _LOGS},
        tensors={name: tensor.detach() for name, tensor in _tensors(module) if name in known},
        added={
            path: new
            for path, part in module.named_modules()
            if path in known and (new := _new_in(part, path, known))
        },
        attributes={
            path: _plain_attributes(part) for path, part in module.named_modules() if path in known
        },
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
    _update_module(run.module, brought)
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


def _update_module(module: Module, brought: RankResult) -> None:
    parts = dict(module.named_modules())
    for path, new in brought.added.items():
        for kind, items in new.items():
            vars(parts[path])[kind].update(deepcopy(items))
    tensors = dict(_tensors(module))
    with torch.no_grad():
        for name, received in brought.tensors.items():
            kept = tensors[name]
            if isinstance(kept, UninitializedParameter | UninitializedBuffer):
                kept.materialize(received.shape, dtype=received.dtype)
            if kept.shape == received.shape and kept.dtype == received.dtype:
                kept.copy_(received)
            else:
                kept.data = received.clone()  # the run resized it
    for path, attributes in brought.attributes.items():
        _set(parts[path], _copy(attributes))


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


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _new_in(part: nn.Module, path: str, known: frozenset[str]) -> dict[str, dict[str, Any]]:
    """Return the run's additions to one module, by the nn.Module dictionary that holds them."""
    prefix = f"{path}." if path else ""
    found = {
        kind: {
            name: value
            for name, value in vars(part)[kind].items()
            if value is not None and prefix + name not in known
        }
        for kind in _REGISTERED
    }
    return {kind: items for kind, items in found.items() if items}


def _plain_attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes that are numbers, strings, tensors, arrays, or collections of them."""
    return {
        name: map_tensors(value, _to_cpu)
        for name, value in vars(thing).items()
        if name not in _OWN and _is_plain(value)
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
    # A file of functions is a module, whose globals are no state. Objects with slots have none.
    return (
        _plain_attributes(part.plugin)
        if hasattr(part.plugin, "__dict__") and not isinstance(part.plugin, ModuleType)
        else {}
    )
