"""What a rank has beside a checkpoint: attributes of its module and of the user's callbacks."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from geartrain import Run
from geartrain.plugin_api import map_tensors, not_plain

#: Attributes of torch's own: hooks, parameters, modules.
_TORCH = frozenset(vars(nn.Module())) - {"training"}


def attributes(run: Run) -> list[dict[str, Any]]:
    """Return copies of the attributes of each object that are plain data or random generators.

    Plain data are numbers, strings, tensors, and lists, tuples, sets and dicts of them. Parameters
    and buffers are left out, also as parts of lists: a copy would be another tensor.
    """
    state = [*run.module.parameters(), *run.module.buffers()]
    known = {tensor.data_ptr() for tensor in state if tensor.layout is torch.strided}
    found = []
    for thing in _objects(run):
        values = {}
        for name, value in vars(thing).items():
            data = _data(value)
            if name not in _TORCH and not_plain(data) is None and not _contains(data, known):
                values[name] = map_tensors(data, _copied)
        if isinstance(thing, nn.Module):  # a checkpoint has no such buffers
            for name in thing._non_persistent_buffers_set:
                values[name] = map_tensors(thing._buffers[name], _copied)
        found.append(values)
    return found


def restore(run: Run, saved: list[dict[str, Any]]) -> None:
    """Set what :func:`attributes` returned in another process.

    Values that are equal stay the same objects, which others may refer to. The list is empty if the
    rank resumes from a file.
    """
    for thing, values, present in zip(_objects(run), saved, attributes(run), strict=False):
        for name, value in values.items():
            current: Any = getattr(thing, name, None)
            if name in present and pickle.dumps(value) == pickle.dumps(present[name]):
                continue
            if isinstance(current, random.Random):
                current.setstate(value)
            elif isinstance(current, torch.Generator):
                current.set_state(value)
            elif hasattr(current, "bit_generator"):
                current.bit_generator.state = value
            else:
                setattr(thing, name, value)


def _objects(run: Run) -> Iterator[Any]:
    """Yield the module and its parts, and the user's plugins and callbacks without a state."""
    yield from run.module.modules()
    for part in run.hooks.parts:
        if part.info.kind == "plugin" and part.info.distribution is None and part.state() is None:
            thing = getattr(part.plugin, "callback", part.plugin)
            if hasattr(thing, "__dict__"):
                yield thing


def _data(value: Any) -> Any:
    """Return the state of a random generator; any other value as it is."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value).__name__ == "Generator" and hasattr(value, "bit_generator"):  # numpy's
        return value.bit_generator.state
    return value


def _contains(data: Any, known: set[int]) -> bool:
    """True if one of the known tensors is in plain data, or a tensor that cannot be copied."""
    if isinstance(data, torch.Tensor):
        return data.layout is not torch.strided or (data.numel() > 0 and data.data_ptr() in known)
    if isinstance(data, dict):
        data = data.values()
    elif isinstance(data, set):
        return any(isinstance(item, torch.Tensor) for item in data)
    elif not isinstance(data, list | tuple):
        return False
    return any(_contains(item, known) for item in data)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
