"""How things travel to a rank, and the path to what cannot."""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import pickle
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from typing import IO, Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from geartrain import UsageError


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value what is defined in a script, a notebook or any other module that a fresh process could not import, so that a
    rank need not run the script again.

    Args:
        buffers: called with the memory of tensors, once for all that share it.
    """

    def __init__(self, file: IO[bytes], buffers: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.UntypedStorage:
            if not obj.nbytes():
                return torch.UntypedStorage, (0,)
            memory = (ctypes.c_char * obj.nbytes()).from_address(obj.data_ptr())
            return _storage, (pickle.PickleBuffer(memory),)
        if type(obj) is torch.Tensor and _is_plain(obj):
            storage = self._storages.setdefault(obj.untyped_storage().data_ptr(), obj.untyped_storage())
            return _tensor, (storage, obj.dtype, obj.storage_offset(), obj.shape, obj.stride(), obj.requires_grad)
        if isinstance(obj, type | types.FunctionType):
            _by_value_where_needed(obj.__module__)
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory and shape say all of it; torch pickles any other itself."""
    strided = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    return bool(
        strided and tensor.is_leaf and not (tensor.is_conj() or tensor.is_neg() or tensor._backward_hooks) and len(tensor.__dict__) == 0
    )


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Any, stride: Any, requires_grad: bool) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride).requires_grad_(requires_grad)


@cache
def _by_value_where_needed(name: str) -> None:
    """Let cloudpickle take along what is in a module that was loaded in another way than a plain import would: a test's, or one that
    was loaded from a file."""
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if module is None or origin is None or name == "__main__":
        return  # built in, made by hand, or by value anyway
    found: ModuleSpec | None = None
    path: Any = None
    for end in (i for i, letter in enumerate(f"{name}.") if letter == "."):
        finders = (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec"))
        found = next((spec for find in finders if (spec := find(name[:end], path)) is not None), None)
        if found is None:
            break
        path = found.submodule_search_locations
    if found is None or found.origin is None or not os.path.exists(found.origin) or not os.path.samefile(found.origin, origin):
        cloudpickle.register_pickle_by_value(module)


# --- what does not pickle ------------------------------------------------------------------------------------------------


def refusal(belongings: Mapping[str, Any], error: Exception, strategy: str) -> UsageError:
    """The error that names what does not pickle.

    Args:
        belongings: what was handed over, by the name under which the user knows it.
        error: what pickling raised.
        strategy: whose error this is.
    """
    for name, thing in belongings.items():
        if _why_not(thing) is not None:
            path, found, reason = _search(name, thing, set())
            return UsageError(
                f"{strategy}: {path}: {_describe(found)} cannot be pickled, and what goes to another process must be ({reason}). "
                "Fix: make it in setup(), which runs in each process, leave it out in __getstate__, or use --strategy ddp, "
                "which needs no pickling"
            )
    return UsageError(f"{strategy}: the run cannot be pickled: {type(error).__name__}: {error}")


def _why_not(thing: Any) -> str | None:
    try:
        Pickler(_Nowhere(), lambda buffer: None).dump(thing)  # type: ignore[arg-type]
    except Exception as error:  # whatever a __reduce__ or __getstate__ of the user's raises
        return f"{type(error).__name__}: {error}" if not isinstance(error, TypeError) else str(error)
    return None


class _Nowhere:
    """A file that forgets what is written."""

    def write(self, data: Any) -> int:
        return len(data)


def _search(path: str, thing: Any, seen: set[int]) -> tuple[str, Any, str]:
    """The innermost part of ``thing`` that does not pickle: its path, itself, and why."""
    seen.add(id(thing))
    for step, part in _parts(thing):
        if id(part) not in seen and _why_not(part) is not None:
            return _search(path + step, part, seen)
    return path, thing, _why_not(thing) or ""


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """What pickling ``thing`` would pickle, each with the step that leads to it."""
    if isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"[{i}]", value) for i, value in enumerate(thing))
    elif isinstance(thing, types.MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, types.FunctionType):
        yield from _parts_of_function(thing)
    elif inspect.isclass(thing):
        yield from ((f".{name}", value) for name, value in vars(thing).items() if not name.startswith("__") or callable(value))
    else:
        yield from _parts_of_object(thing)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((f" (its variable {name!r})", cell.cell_contents) for name, cell in cells)
    used = [name for name in function.__code__.co_names if name in function.__globals__]
    yield from ((f" (its global {name!r})", function.__globals__[name]) for name in used)
    yield from ((f" (its default {i})", value) for i, value in enumerate(function.__defaults__ or ()))


def _parts_of_object(thing: Any) -> Iterator[tuple[str, Any]]:
    try:
        state = thing.__getstate__()
    except Exception:  # it is this object itself that does not pickle
        return
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, Mapping):
            registered = ("_modules", "_parameters", "_buffers")  # nn.Module's: their names are those that a user types
            for name in registered:
                yield from _attributes(attributes.get(name) or {})
            yield from _attributes({name: value for name, value in attributes.items() if name not in registered})
    yield "'s class", type(thing)


def _attributes(attributes: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    return ((f".{name}", value) for name, value in attributes.items())


def _describe(thing: Any) -> str:
    code = getattr(thing, "__code__", None)
    if code is not None:
        return f"{thing.__name__} at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    cls = type(thing)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
