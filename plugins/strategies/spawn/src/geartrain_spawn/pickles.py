"""Pickle objects for a rank, and name those that cannot be pickled."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from multiprocessing import reduction
from typing import IO, Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
import torch

from geartrain import Run, UsageError
from geartrain.plugin_api import DataSource
from geartrain_spawn.refusals import refusals


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that sends by value the definitions that a new process could not import.

    These come from a script, a notebook or a module that was loaded from a file. So a rank need not
    run the script again.

    Args:
        file: the pickle is written here.
        buffers: called with the memory of tensors, once per storage.
    """

    def __init__(self, file: IO[bytes], buffers: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.UntypedStorage:
            if not obj.nbytes():
                return torch.UntypedStorage, (0,)
            memory = (ctypes.c_char * obj.nbytes()).from_address(obj.data_ptr())
            return _storage, (pickle.PickleBuffer(memory),)
        if type(obj) is torch.Tensor and _is_plain(obj):
            # Tensors that share memory share one storage object, so the pickler writes it once.
            return _tensor, (
                obj.untyped_storage(),
                obj.dtype,
                obj.storage_offset(),
                obj.shape,
                obj.stride(),
                obj.requires_grad,
            )
        if isinstance(obj, type | types.FunctionType):
            _by_value_if_needed(obj.__module__)
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if a tensor is only memory and shape; torch pickles all others."""
    strided = (
        tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    )
    return bool(
        strided
        and tensor.is_leaf
        and not (tensor.is_conj() or tensor.is_neg() or tensor._backward_hooks)
        and len(tensor.__dict__) == 0
    )


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Any,
    stride: Any,
    requires_grad: bool,
) -> torch.Tensor:
    return (
        torch.empty(0, dtype=dtype)
        .set_(storage, offset, shape, stride)
        .requires_grad_(requires_grad)
    )


#: The folder of the standard library.
_STDLIB = os.path.join(os.path.dirname(os.__file__), "")


@cache
def _by_value_if_needed(name: str) -> None:
    """Make cloudpickle send a module by value if a plain import would not find it.

    Examples are a test module, and a module that was loaded from a file.
    """
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if module is None or origin is None or name == "__main__":
        return  # built in, created in memory, or already by value
    if name.partition(".")[0] in sys.stdlib_module_names and origin.startswith(_STDLIB):
        return  # abc is frozen, so its spec has no file; collections.abc may be an alias
    found: ModuleSpec | None = None
    path: Any = None
    for end in (i for i, letter in enumerate(f"{name}.") if letter == "."):
        finders = (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec"))
        found = next(
            (spec for find in finders if (spec := find(name[:end], path)) is not None), None
        )
        if found is None:
            break
        path = found.submodule_search_locations
    if (
        found is None
        or found.origin is None
        or not os.path.exists(found.origin)
        or not os.path.samefile(found.origin, origin)
    ):
        cloudpickle.register_pickle_by_value(module)


#: The reducers of multiprocessing and torch.multiprocessing for descriptors and tensors.
_SHARED = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]


class _WorkerPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """The pickler for loader workers of a rank: multiprocessing's, with definitions by value."""

    dispatch_table: ClassVar[Any] = ChainMap(_SHARED, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            _by_value_if_needed(obj.__module__)
        return super().reducer_override(obj)


def pickle_by_value_for_workers() -> None:
    """Enable loader workers by ``spawn`` and ``forkserver`` in this rank.

    A dataset class of the caller's script is here only by value: the rank's ``__main__`` lacks it.
    """

    def dump_for_worker(obj: Any, file: Any, protocol: int | None = None) -> None:
        _WorkerPickler(file, protocol).dump(obj)

    reduction.dump = dump_for_worker


# --- objects that do not pickle -------------------------------------------------------------------


def pickled_arguments(run: Run, worker: Any) -> dict[str, Any]:
    """Return the objects that travel with a run, by the user's names for them, for errors."""
    source = next(
        (argument for argument in getattr(worker, "args", ()) if isinstance(argument, DataSource)),
        None,
    )
    given = (
        {}
        if source is None
        else {
            _argument(run.command, stage): loader
            for stage, loader in source.given.items()
            if loader is not None
        }
    )
    plugins = {
        part.info.label: part.plugin
        for part in run.hooks.parts
        if part.recreate is None and not part.info.is_core
    }
    given |= getattr(worker, "pickled_arguments", {})  # of a Session's function
    return {
        "model": run.module,
        **given,
        "datamodule": run.trainer.datamodule,
        **plugins,
        "trainer": run.trainer,
    }


def _argument(command: str, stage: str) -> str:
    return (
        "dataloaders"
        if command != "fit"
        else "train_dataloaders"
        if stage == "train"
        else "val_dataloaders"
    )


def refusal(arguments: Mapping[str, Any], error: Exception, strategy: str) -> UsageError:
    """Return the error that names an object that does not pickle.

    Args:
        arguments: the objects to pickle; see :func:`pickled_arguments`.
        error: the exception that pickling raised.
        strategy: label of the strategy, for the message.
    """
    for name, thing in arguments.items():
        for found in refusals(name, thing, dump, by_value=True):
            return UsageError(
                f"{strategy}: {found.path}: {found.what} cannot be pickled, so it cannot be sent "
                f"to another process ({found.why}). "
                "Fix: create it in setup(), which runs in each process, leave it out in "
                "__getstate__, or use --strategy ddp, which needs no pickling"
            )
    return UsageError(f"{strategy}: the run cannot be pickled: {type(error).__name__}: {error}")


def dump(thing: Any, file: IO[bytes]) -> None:
    """Pickle as for a rank, but skip the memory of tensors."""
    Pickler(file, lambda buffer: None).dump(thing)
