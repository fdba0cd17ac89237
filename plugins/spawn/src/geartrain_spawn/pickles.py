"""How things travel to a rank, and the path to what cannot."""

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
    """Pickles by value the definitions of a script, a notebook or any other module that a fresh process could not import, so that a
    rank need not run the script again.

    Args:
        buffers: called with the memory of tensors, once for all that share it.
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
            # Tensors that share memory have one storage, also as a Python object: the pickler knows it when it comes again.
            return _tensor, (
                obj.untyped_storage(),
                obj.dtype,
                obj.storage_offset(),
                obj.shape,
                obj.stride(),
                obj.requires_grad,
            )
        if isinstance(obj, type | types.FunctionType):
            _by_value_where_needed(obj.__module__)
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if memory and shape are all of a tensor; torch pickles any other itself."""
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


@cache
def _by_value_where_needed(name: str) -> None:
    """Let cloudpickle pickle the contents of a module that was loaded in another way than a plain import would: a test's, or one that
    was loaded from a file."""
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if module is None or origin is None or name == "__main__":
        return  # built in, made by hand, or by value anyway
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


#: How multiprocessing and torch.multiprocessing pickle descriptors and tensors.
_SHARED = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]


class _WorkerPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles for a loader worker that a rank starts: as multiprocessing does, and by value names that a new process cannot import."""

    dispatch_table: ClassVar[Any] = ChainMap(_SHARED, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            _by_value_where_needed(obj.__module__)
        return super().reducer_override(obj)


def pickle_by_value_for_workers() -> None:
    """Let this rank start loader workers by ``spawn`` and ``forkserver``: a dataset of the caller's script came here by value, and the
    rank's own ``__main__`` does not have its class."""

    def dump_for_worker(obj: Any, file: Any, protocol: int | None = None) -> None:
        _WorkerPickler(file, protocol).dump(obj)

    reduction.dump = dump_for_worker


# --- what does not pickle ------------------------------------------------------------------------------------------------


def pickled_arguments(run: Run, worker: Any) -> dict[str, Any]:
    """Return the objects that travel with a run, by the names that its user knows: for an error about something that cannot go."""
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
        for part in run.trainer._parts
        if part.make_again is None and not part.info.is_core
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
    """Return the error that names what does not pickle.

    Args:
        arguments: the objects to pickle; see :func:`pickled_arguments`.
        error: what pickling raised.
        strategy: whose error this is.
    """
    for name, thing in arguments.items():
        for found in refusals(name, thing, dump, by_value=True):
            return UsageError(
                f"{strategy}: {found.path}: {found.what} cannot be pickled, and what goes to another process must be ({found.why}). "
                "Fix: make it in setup(), which runs in each process, leave it out in __getstate__, or use --strategy ddp, "
                "which needs no pickling"
            )
    return UsageError(f"{strategy}: the run cannot be pickled: {type(error).__name__}: {error}")


def dump(thing: Any, file: IO[bytes]) -> None:
    """Pickle as for a rank, but without the memory of tensors."""
    Pickler(file, lambda buffer: None).dump(thing)
