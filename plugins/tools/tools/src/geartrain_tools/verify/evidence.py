"""A plugin in a file: records what may make ranks differ. ``verify ranks`` adds it."""

from __future__ import annotations

import ctypes
import io
import json
import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from geartrain import Run, hookimpl
from geartrain.plugin_api import map_tensors

#: Bytes of an array whose contents are compared.
_MOST = 1 << 20
#: Packages whose classes no user has written.
_LIBRARIES = ("torch", "geartrain", "builtins", "abc", "typing")


class Evidence:
    """Write a line for each step to ``evidence/RANK.jsonl`` in the run's folder.

    ``batches``: a checksum of each batch; ``settings``: those of torch that hold for a process or
    a thread; ``shared``: variables outside the module's objects that have changed since the last
    step, as ``Net.count`` or ``count``.
    """

    def __init__(self) -> None:
        self._batches: list[int] = []
        self._shared: dict[str, Any] = {}

    @hookimpl
    def on_train_start(self, run: Run) -> None:
        self._shared = dict(shared(run.module))

    @hookimpl
    def on_train_batch_start(self, batch: Any) -> None:
        self._batches.append(_checksum(batch))

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        assert run.output is not None
        before, self._shared = self._shared, dict(shared(run.module))
        changed = [name for name, value in self._shared.items() if before.get(name) != value]
        line = {
            "step": run.step,
            "batches": self._batches,
            "settings": _settings(),
            "shared": changed,
        }
        self._batches = []
        path = Path(run.output, "evidence", f"{run.world.rank}.jsonl")
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")


def _settings() -> dict[str, Any]:
    return {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": (
            torch.are_deterministic_algorithms_enabled()
        ),
    }


def _checksum(batch: Any) -> int:
    """Return a checksum of the tensors of a batch on the CPU."""
    found = 0

    def add(tensor: torch.Tensor) -> None:
        nonlocal found
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            same = tensor.detach().contiguous()
            data = ctypes.string_at(same.data_ptr(), same.numel() * same.element_size())
            found = crc32(data, found)

    map_tensors(batch, add)
    return found


def shared(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield attributes of the user's classes, and global variables of their methods, with a value.

    The value changes if the variable does. Only what can be pickled is here.
    """
    remaining = [cls for each in module.modules() for cls in type(each).__mro__]
    seen: set[type] = set()
    while remaining:
        cls = remaining.pop()
        if cls in seen or cls.__module__.partition(".")[0] in _LIBRARIES:
            continue
        seen.add(cls)
        variables = {f"{cls.__name__}.{name}": value for name, value in vars(cls).items()}
        for function in vars(cls).values():
            if isinstance(function, types.FunctionType):
                variables |= function.__globals__
        for name, value in variables.items():
            if isinstance(value, type):
                if value.__module__ == cls.__module__:  # such as a dataset's
                    remaining.append(value)
            elif not name.rpartition(".")[2].startswith(("__", "_abc_")):
                found = _value(value)
                if found is not None:
                    yield name, found


class _Pickler(pickle.Pickler):
    """Writes of a tensor how often it was changed, and no contents of large arrays."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return id(obj), obj._version
        return id(obj) if getattr(obj, "nbytes", 0) > _MOST else None


def _value(obj: Any) -> int | None:
    if callable(obj) or isinstance(obj, types.ModuleType | property | classmethod | staticmethod):
        return None
    file = io.BytesIO()
    try:
        _Pickler(file).dump(obj)
    except Exception:  # a user's object may fail in any way
        return None
    return crc32(file.getvalue())
