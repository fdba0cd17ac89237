"""Batches and outputs: tensors in nested lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

#: The types that a checkpoint can hold, and lists, tuples, sets and dicts of them.
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, bytearray)
_PLAIN += (torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device)


def map_tensors(
    data: Any, function: Callable[[torch.Tensor], Any], device: torch.device | None = None
) -> Any:
    """Return ``data`` with ``function`` applied to every tensor in it.

    Lists, tuples, named tuples, mappings and dataclasses keep their form; the rest is not changed.
    With ``device`` each number is a tensor on it.
    """
    if device is not None and isinstance(data, bool | int | float):
        data = torch.tensor(data, device=device)
    if isinstance(data, torch.Tensor):
        return function(data)
    return map_nested(data, lambda item: map_tensors(item, function, device))


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch on ``device``. Copies from pinned memory overlap with computation.

    It moves tensors and objects with ``.to(device)``, in any nesting of lists, tuples, named
    tuples, mappings and dataclasses.
    """
    if isinstance(batch, torch.Tensor):
        # On mps torch would read the batch after this call, when the loader may have freed it:
        # wrong values, no error (pytorch/pytorch#189690). On cuda a copy from pageable memory is
        # staged before the call returns.
        return batch.to(device, non_blocking=device.type != "mps")
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return map_nested(batch, lambda item: move(item, device))


def map_nested(data: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``data`` with ``function`` applied to each of its items, one level deep.

    A list, tuple, named tuple, mapping or dataclass keeps its form; the rest is not changed.
    """
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(function, data))
    if isinstance(data, list | tuple):
        return type(data)(map(function, data))
    if isinstance(data, Mapping):
        items = {key: function(value) for key, value in data.items()}
        if not isinstance(data, MutableMapping) or type(data) is dict:
            return items
        same = copy.copy(data)  # an OrderedDict or defaultdict stays one
        for key, value in items.items():
            same[key] = value  # one by one: the outputs of transformers forbid update()
        return same
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = (field.name for field in dataclasses.fields(data) if field.init)
        return dataclasses.replace(data, **{name: function(getattr(data, name)) for name in names})
    return data


def not_plain(value: Any, plain: tuple[type, ...] = _PLAIN) -> str | None:
    """Return the class of the first item that ``torch.load(weights_only=True)`` could not read.

    ``None`` if it can read all: tensors, numbers, strings; lists, tuples, sets and dicts of them;
    classes that the program has added to ``torch.serialization.add_safe_globals``.
    """
    if value is None or type(value) in (*plain, *torch.serialization.get_safe_globals()):
        return None
    kind: Any = type(value)
    is_tensor = torch.Tensor in plain and issubclass(kind, torch.Tensor)
    if is_tensor and kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__:
        return None  # a device's class may pickle its tensors as those of the CPU
    if type(value) in (dict, OrderedDict, Counter):
        value = (*value, *value.values())
    elif type(value) not in (list, tuple, set):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return next((found for item in value if (found := not_plain(item, plain)) is not None), None)
