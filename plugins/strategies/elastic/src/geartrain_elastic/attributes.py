"""The attributes of a module and of the user's callbacks, which no checkpoint contains."""

from __future__ import annotations

import hashlib
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
    """Attributes that are data or random generators, and ``requires_grad`` of parameters.

    Data are numbers, strings, tensors, NumPy's arrays, and lists, tuples, sets and dicts of them.
    The objects are the module, its submodules, the user's plugins without a state, and objects of
    the user's classes in their attributes.

    Args:
        run: its fit begins. Attributes with tensors or arrays that stay as they are now are left
            out.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        #: Path and name -> the digest when the fit began, and the tensors and arrays, which are
        #: kept, so that no other tensor gets the id of one of them.
        self._initial: dict[tuple[str, str], tuple[bytes, list[Any]]] = {}
        for path, thing in _objects(run):
            for name, value in _values(thing).items():
                if arrays := _arrays(value):
                    self._initial[path, name] = _digest(value), arrays

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of each object by its path, to be pickled at once.

        Attributes with parameters, buffers or views of them are left out: a rank that starts again
        would get other tensors.
        """
        module = self._run.module
        tensors = [*module.parameters(), *module.buffers()]
        storages = {_storage(each) for each in tensors if each.layout is torch.strided}
        found: dict[str, dict[str, Any]] = {}
        for path, thing in _objects(self._run):
            saved = found.setdefault(path, {})
            for name, value in _values(thing).items():
                if (initial := self._initial.get((path, name))) and initial[0] == _digest(value):
                    continue
                if not any(_is_shared(each, storages) for each in _arrays(value)):
                    saved[name] = map_tensors(value, _compact)
            if isinstance(thing, nn.Module):  # what no checkpoint has
                for name in thing._non_persistent_buffers_set:
                    saved[name] = map_tensors(thing._buffers[name], _compact)
                for name, parameter in thing._parameters.items():
                    saved[name] = None if parameter is None else parameter.requires_grad
        return found

    def restore(self, saved: dict[str, dict[str, Any]]) -> None:
        """Set what :meth:`state` returned in another process.

        Generators, and values that are equal, stay the same objects: others may refer to them.
        """
        for path, thing in _objects(self._run):
            present = _values(thing)
            for name, value in saved.get(path, {}).items():
                current: Any = getattr(thing, name, None)
                if isinstance(current, nn.Parameter):
                    current.requires_grad_(value)
                elif name in present and pickle.dumps(value) == pickle.dumps(present[name]):
                    continue
                elif _is_generator(value) and type(current) is type(value):
                    _set_state(current, value)
                else:
                    setattr(thing, name, value)


def _objects(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield the path of each object, and the object."""
    remaining: list[tuple[str, Any]] = list(run.module.named_modules())
    for number, part in enumerate(run.hooks.parts):
        if part.info.kind == "plugin" and part.info.distribution is None and part.state() is None:
            remaining.append((f"plugin {number}", getattr(part.plugin, "callback", part.plugin)))
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
    """Return the attributes that are data or random generators."""
    return {k: value for k, value in vars(thing).items() if k not in _TORCH and _is_data(value)}


def _is_data(value: Any) -> bool:
    if type(value) is dict:
        value = [*value, *value.values()]
    if type(value) in (list, tuple, set):
        return all(map(_is_data, value))
    return _is_array(value) or _is_generator(value) or not_plain(value) is None


def _is_array(value: Any) -> bool:
    """True for NumPy's arrays and numbers."""
    kind = getattr(value, "dtype", None) if type(value).__module__ == "numpy" else None
    return kind is not None and not kind.hasobject


def _is_generator(value: Any) -> bool:
    if type(value).__module__.startswith("numpy.random."):
        return type(value).__name__ in ("Generator", "RandomState")
    return type(value) in (random.Random, torch.Generator)


def _set_state(generator: Any, other: Any) -> None:
    """Give a random generator the state of another one of its type."""
    if isinstance(generator, random.Random):
        generator.setstate(other.getstate())
    elif hasattr(generator, "set_state"):
        generator.set_state(other.get_state())
    else:
        generator.bit_generator.state = other.bit_generator.state


def _arrays(value: Any) -> list[Any]:
    """Return the tensors and arrays in data."""
    if isinstance(value, torch.Tensor) or _is_array(value):
        return [value]
    if type(value) is dict:
        value = value.values()
    elif type(value) not in (list, tuple, set):
        return []
    return [array for item in value for array in _arrays(item)]


def _digest(value: Any) -> bytes:
    """Return 32 bytes that differ if the data differ; of a tensor its id and version count."""
    return hashlib.sha256(pickle.dumps(map_tensors(value, _mark))).digest()


def _mark(tensor: torch.Tensor) -> Any:
    """Return the id and the version, or an inference tensor, which has no version."""
    return tensor if tensor.is_inference() else (id(tensor), tensor._version)


def _is_shared(array: Any, storages: set[int]) -> bool:
    """True for a tensor in one of these storages, and for a sparse one, which has none."""
    if not isinstance(array, torch.Tensor):
        return False
    if array.layout is not torch.strided:
        return True
    return array.numel() > 0 and _storage(array) in storages


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, without the rest of its storage."""
    return tensor.detach().clone()
