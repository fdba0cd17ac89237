"""What a rank has beside a checkpoint: attributes of its module and of the user's callbacks."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from geartrain import Run
from geartrain.plugin_api import map_tensors, not_plain

#: Attributes of torch's own: hooks, parameters, modules.
_TORCH = frozenset(vars(nn.Module())) - {"training"}
#: Packages whose objects are not the user's.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "geartrain"}


class Attributes:
    """Attributes that are plain data or random generators, and ``requires_grad`` of parameters.

    Plain data are numbers, strings, tensors, NumPy's arrays, and lists, tuples, sets and dicts of
    them. Objects are the module, its parts, the user's plugins without a state, and objects of the
    user's classes in their attributes.

    Args:
        run: its fit begins. Tensors that stay as they are now are left out.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tensors: list[torch.Tensor] = []  # kept, so that no other one gets the same mark
        for _, thing in _objects(run):
            for value in _values(thing).values():
                map_tensors(value, self._tensors.append)
        self._marks = set(map(_mark, self._tensors))

    def copies(self) -> dict[str, dict[str, Any]]:
        """Return copies of the attributes of each object, by its path.

        Parameters and buffers are left out, also as parts of lists: a copy would be another tensor.
        """
        module = self._run.module
        state = [*module.parameters(), *module.buffers()]
        known = {each.data_ptr() for each in state if each.layout is torch.strided}
        found: dict[str, dict[str, Any]] = {}
        for path, thing in _objects(self._run):
            copied = found.setdefault(path, {})
            for name, data in _values(thing).items():
                tensors: list[torch.Tensor] = []
                map_tensors(data, tensors.append)
                is_same = bool(tensors) and all(_mark(each) in self._marks for each in tensors)
                if not is_same and not any(_is_state(each, known) for each in tensors):
                    copied[name] = map_tensors(data, _copied)
            if isinstance(thing, nn.Module):  # what no checkpoint has
                for name in thing._non_persistent_buffers_set:
                    copied[name] = map_tensors(thing._buffers[name], _copied)
                for name, parameter in thing._parameters.items():
                    copied[name] = None if parameter is None else parameter.requires_grad
        return found

    def restore(self, saved: dict[str, dict[str, Any]]) -> None:
        """Set what :meth:`copies` returned in another process.

        Values that are equal stay the same objects, which others may refer to.
        """
        for path, thing in _objects(self._run):
            present = _values(thing)
            for name, value in saved.get(path, {}).items():
                current: Any = getattr(thing, name, None)
                if isinstance(current, nn.Parameter):
                    current.requires_grad_(value)
                elif name in present and pickle.dumps(value) == pickle.dumps(present[name]):
                    continue
                elif isinstance(current, random.Random):
                    current.setstate(value)
                elif isinstance(current, torch.Generator):
                    current.set_state(value)
                elif _is_numpy(current, "Generator"):
                    current.bit_generator.state = value
                elif _is_numpy(current, "ndarray"):
                    setattr(thing, name, value.numpy())
                else:
                    setattr(thing, name, value)


def _objects(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield the path of each object, and the object."""
    remaining: list[tuple[str, Any]] = list(run.module.named_modules())
    for number, part in enumerate(run.hooks.parts):
        if part.info.kind == "plugin" and part.info.distribution is None and part.state() is None:
            remaining.append((f"{number}", getattr(part.plugin, "callback", part.plugin)))
    seen = set()
    while remaining:
        path, thing = remaining.pop(0)
        if id(thing) not in seen and hasattr(thing, "__dict__"):
            seen.add(id(thing))
            yield path, thing
            remaining += [
                (f"{path}.{name}", value)
                for name, value in vars(thing).items()
                if name not in _TORCH and _is_users(value)
            ]


def _is_users(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return package not in _LIBRARIES and not package.startswith("geartrain_")


def _values(thing: Any) -> dict[str, Any]:
    """Return the attributes that are plain data, and the states of random generators."""
    found = {name: _data(value) for name, value in vars(thing).items() if name not in _TORCH}
    return {name: data for name, data in found.items() if not_plain(data) is None}


def _data(value: Any) -> Any:
    """Return an array as a tensor, the state of a random generator, any other value as it is."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if _is_numpy(value, "Generator"):
        return value.bit_generator.state
    if _is_numpy(value, "ndarray") and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    return value


def _is_numpy(value: Any, name: str) -> bool:
    kind = type(value)
    return kind.__name__ == name and kind.__module__.partition(".")[0] == "numpy"


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what another tensor, or this one after a change, does not have."""
    return id(tensor), tensor._version


def _is_state(tensor: torch.Tensor, known: set[int]) -> bool:
    """True for a parameter or buffer, and for a tensor that cannot be copied."""
    return tensor.layout is not torch.strided or (tensor.numel() > 0 and tensor.data_ptr() in known)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
