"""The objects of a rank's module and callbacks, and what they contain, for another process."""

from __future__ import annotations

import ctypes
import importlib
import io
import pickle
import sys
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from importlib.util import find_spec
from types import FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from torch import nn

from geartrain import Run, TrainingError
from geartrain.plugin_api import LoadedPlugin, warn
from geartrain_spawn.pickles import Pickler

_numpy: Any = importlib.import_module("numpy") if find_spec("numpy") else None
_ARRAYS: Any = (_numpy.ndarray,) if _numpy else ()
#: Objects that never change, except tuples, which may contain others.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type, Enum)
#: Attributes of torch's own: hooks, also those of lazy modules, and what ``compile`` has made.
_HOOKS = frozenset(vars(nn.Module())) | {"_load_hook", "_initialize_hook", "_compiled_call_impl"}
_HOOKS -= {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
#: Packages whose objects have no attributes of the user's, except those of these classes.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "geartrain"}
_NAMESPACES = (SimpleNamespace, Namespace, UserDict, UserList)
#: A class with one of these decides what of an object is for another process, such as a connection
#: to a database. So the object stays as it is in each process.
_OWN = ("__getstate__", "__reduce__", "__reduce_ex__")

#: The name of an object, and one of its attributes; ``""`` for its items, bytes or state.
_Place = tuple[str, str]


class RankObjects:
    """The objects to which the user's module and plugins lead.

    An object that exists now is named after its path, which is the same in every process that has
    the run. A pickle of the state has the names of these objects in place of them, and all other
    objects once. So another process changes its own objects in place, and what was one object for
    several others is one object again.

    Args:
        run: it begins. Tensors and arrays that stay as they are now are left out.
        elsewhere: returns the ids of the tensors, and of the memory, that the other process gets in
            another way.
        stays: objects of these classes stay in their process, with all that they contain.
    """

    def __init__(
        self, run: Run, elsewhere: Callable[[], set[int]], stays: tuple[type, ...] = ()
    ) -> None:
        self._run, self._elsewhere, self._stays = run, elsewhere, stays
        self.by_name = dict(reachable(run, stays))
        self._names = {id(thing): name for name, thing in self.by_name.items()}
        #: What need not be saved if it is still so: see :meth:`_mark`.
        self._began: dict[_Place, Any] = {}
        self._attributes: dict[str, Any] = {}
        sent = elsewhere()
        for name, thing in self.by_name.items():
            if id(thing) not in sent:
                self._began[name, ""] = self._mark(thing)
            attributes = _attributes(thing)
            self._attributes[name] = attributes.keys()
            for attribute, value in attributes.items():
                self._began[name, attribute] = self._names.get(id(value))
        #: What cannot be pickled.
        self._left_out: set[_Place] = set()

    def state(self, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
        """Return what the objects contain, pickled.

        Args:
            buffers: an empty list for the memory of tensors, which then is not in the pickle.
        """
        try:
            return self._pickled(dict(self._contents()), buffers)
        except Exception:
            for place, value in self._contents():
                try:
                    self._pickled(value, [])
                except _Stays:
                    self._left_out.add(place)
                except Exception as error:
                    self._leave_out(place, error)
        if buffers is not None:
            buffers.clear()
        return self._pickled(dict(self._contents()), buffers)

    def _contents(self) -> Iterator[tuple[_Place, Any]]:
        sent = self._elsewhere()
        for name, thing in self.by_name.items():
            has_changed = id(thing) not in sent and self._has_changed(name, "", self._mark(thing))
            if has_changed and (content := _content(thing)) is not None:
                yield (name, ""), content
            attributes = _attributes(thing)
            for attribute, value in attributes.items():
                if self._has_changed(name, attribute, self._names.get(id(value))):
                    yield (name, attribute), value
            for attribute in self._attributes[name] - attributes.keys():
                yield (name, attribute), _Deleted

    def _has_changed(self, name: str, attribute: str, mark: Any) -> bool:
        """True if an object may contain something else there than when the fit began."""
        place = name, attribute
        return (mark is None or self._began.get(place) != mark) and place not in self._left_out

    def _mark(self, thing: Any) -> Any:
        """Return a value that is another one if an object has changed; ``None`` if unknown.

        Numbers and strings of the user's are always saved: they may be times, or names of files.
        """
        if type(thing) is torch.UntypedStorage:
            return crc32(_memory(thing))
        if has_storage(thing):
            storage, *form = _form(thing)
            return id(storage), form
        if _is(thing, _ARRAYS) and not thing.dtype.hasobject:
            return crc32(thing.tobytes()), thing.dtype, thing.shape
        if _is(thing, dict):
            names = [(key, self._names.get(id(value))) for key, value in dict.items(thing)]
            return names if all(type(key) is str and name for key, name in names) else None
        return None

    def _pickled(self, contents: Any, buffers: list[pickle.PickleBuffer] | None) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._names, self._stays, buffers).dump(contents)
        return file.getvalue()

    def _leave_out(self, place: _Place, error: Exception) -> None:
        self._left_out.add(place)
        warn(
            f"{self._run.plan.strategy.label}: {'.'.join(filter(None, place))} cannot be pickled "
            f"({type(error).__name__}: {error}), so no other process gets it"
        )


def restore(objects: dict[str, Any], state: bytes, buffers: Iterable[Any] = ()) -> None:
    """Let objects contain what those of another process did.

    Args:
        objects: by their names; see :func:`reachable`.
        state: of :meth:`RankObjects.state` in the other process.
        buffers: the memory of tensors beside it, which becomes that of new ones.

    Raises:
        TrainingError: an object refers to one that is missing here.
    """
    for (name, attribute), value in _Unpickler(state, objects, buffers).load().items():
        if (thing := objects.get(name)) is None:
            continue  # so no other object refers to it
        if not attribute:
            _fill(thing, value)
        elif value is not _Deleted:
            object.__setattr__(thing, attribute, value)  # past the class's own
        elif attribute in _attributes(thing):
            object.__delattr__(thing, attribute)


class _Deleted:
    """In place of an attribute that existed when the fit began."""


class _Stays(pickle.PicklingError):
    """An object stays in its process."""


class _Pickler(Pickler):
    """Pickle a reference to each object that has a name."""

    def __init__(
        self, file: Any, names: dict[int, str], stays: tuple[type, ...], buffers: list[Any] | None
    ) -> None:
        super().__init__(file, None if buffers is None else buffers.append)
        self._names, self._stays = names, stays

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if _is(obj, self._stays):
            raise _Stays
        if _is(obj, io.TextIOWrapper):  # cloudpickle would read it
            raise pickle.PicklingError("it is an open file")
        if _package(obj).startswith("geartrain"):
            raise pickle.PicklingError(f"it has an object of {type(obj).__qualname__}")
        if type(obj) is torch.Tensor and not (obj.is_leaf and obj.device.type == "cpu"):
            obj = obj.detach().cpu()
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, state: bytes, objects: dict[str, Any], buffers: Iterable[Any]) -> None:
        super().__init__(io.BytesIO(state), buffers=buffers)
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        try:
            return self._objects[pid]
        except KeyError:
            raise TrainingError(
                f"the state of a rank has {pid}, which it had when the run began, and this process "
                "has none. Fix: create the same objects in each process"
            ) from None


# --- which objects --------------------------------------------------------------------------------


def reachable(run: Run, stays: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each object, with the first path that leads to it.

    Args:
        stays: what objects of these classes contain is left out.
    """
    remaining: deque[tuple[str, Any]] = deque([("run", run), ("trainer", run.trainer)])
    remaining += [(f"optimizer {i}", each) for i, each in enumerate(run.optimizers)]
    remaining += [(f"scheduler {i}", each.scheduler) for i, each in enumerate(run.schedulers)]
    remaining.append(("module", run.module))
    for number, part in enumerate(run.hooks.parts):
        if is_users(part):
            plugin = getattr(part.plugin, "callback", part.plugin)
            remaining.append((f"{part.info.name}#{number}", plugin))
    seen: set[int] = set()
    while remaining:
        path, thing = remaining.popleft()
        if _is(thing, _CONSTANTS) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if not _is(thing, tuple):
            yield path, thing
        if not _is(thing, stays):
            remaining += [(f"{path}{label}", value) for label, value in _children(thing)]


def is_users(part: LoadedPlugin) -> bool:
    """True for a plugin that the user has written."""
    return part.info.kind == "plugin" and part.info.distribution is None


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    if has_storage(thing):
        yield " storage", thing.untyped_storage()
    elif _is(thing, dict):
        for number, (key, value) in enumerate(dict.items(thing)):
            label = repr(key) if isinstance(key, _CONSTANTS) else f"#{number}"
            yield from ((f"[{label}]", value), (f" key {label}", key))
    elif _is(thing, (list, tuple, deque)):
        yield from ((f"[{index}]", value) for index, value in enumerate(_items(thing)))
    elif _is_random(thing) and hasattr(thing, "bit_generator"):  # NumPy's
        yield " bits", thing.bit_generator
    yield from ((f".{name}", value) for name, value in _attributes(thing).items())


def _attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of a module and of a user's object, also those in ``__slots__``."""
    if _is(thing, nn.Module):
        return {name: value for name, value in vars(thing).items() if name not in _HOOKS}
    package = _package(thing)
    is_users = package not in _LIBRARIES and not package.startswith("geartrain_")
    if not is_users and not _is(thing, _NAMESPACES):
        return {}
    if any(
        isinstance(vars(c).get(name), FunctionType) for c in type(thing).__mro__ for name in _OWN
    ):
        return {}
    # None of the object's own code runs, which object.__getstate__ would call for an empty slot.
    found: dict[str, Any] = {}
    with suppress(AttributeError):  # it has slots alone
        found |= object.__getattribute__(thing, "__dict__")
    for cls in reversed(type(thing).__mro__):
        for name, slot in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # it is empty
                    found[name] = slot.__get__(thing)
    return found


def _is(thing: Any, classes: Any) -> bool:
    """Do as ``isinstance``, which would ask the object for its class, and so run its code."""
    return issubclass(type(thing), classes)


def _items(thing: Any) -> list[Any]:
    kind: Any = next(kind for kind in (list, tuple, deque, set) if _is(thing, kind))
    return list(kind.__iter__(thing))


def _package(thing: Any) -> str:
    return type(thing).__module__.partition(".")[0]


def has_storage(thing: Any) -> bool:
    """True for tensors that are memory and a form: not sparse, quantized or on ``meta``."""
    if type(thing) not in (torch.Tensor, nn.Parameter):
        return False
    return thing.layout is torch.strided and thing.device.type == "cpu" and not thing.is_quantized


# --- their contents -------------------------------------------------------------------------------


def _content(thing: Any) -> Any:
    """Return what an object contains besides attributes; ``None`` if that is unknown."""
    if _is(thing, torch.UntypedStorage):
        return pickle.PickleBuffer(_memory(thing)) if thing.nbytes() else b""
    if has_storage(thing):
        return _form(thing)
    if _is(thing, _ARRAYS):
        return thing.copy()
    if _is(thing, dict):
        return dict(dict.items(thing))
    if _is(thing, (list, deque, set)):
        return _items(thing)
    return thing.__reduce__()[2] if _is_random(thing) else None


def _fill(thing: Any, content: Any) -> None:
    """Let an object contain what :func:`_content` returned for another one."""
    if _is(thing, torch.UntypedStorage):
        if thing.nbytes() != len(content):
            thing.resize_(len(content))
        if content:
            thing.copy_(torch.frombuffer(content, dtype=torch.uint8).untyped_storage())
    elif _is(thing, torch.Tensor):
        (storage, dtype, *place, requires_grad), current = content, _form(thing)
        if current[0] is not storage or current[1:-1] != (dtype, *place):
            thing.data = torch.empty(0, dtype=dtype).set_(storage, *place)
        if thing.is_leaf:
            thing.requires_grad_(requires_grad)
    elif _is(thing, _ARRAYS):
        thing[...] = content
    elif _is(thing, dict):
        thing.clear()
        for key, value in content.items():
            thing[key] = value
    elif _is(thing, set):
        thing.clear()
        thing.update(content)
    elif _is(thing, (list, deque)):
        thing.clear()
        thing.extend(content)
    else:
        thing.__setstate__(content)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return tensor.untyped_storage(), tensor.dtype, *place, tensor.requires_grad


def _is_random(thing: Any) -> bool:
    module = type(thing).__module__
    return type(thing) is torch.Generator or module == "random" or module.startswith("numpy.random")


def _memory(storage: torch.UntypedStorage) -> Any:
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
