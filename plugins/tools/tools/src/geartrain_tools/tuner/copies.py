"""Copy the user's module for a finder, and restore random generators afterwards."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch

from geartrain import DataModule, Module, UsageError
from geartrain.plugin_api import Stage

#: DataModule attributes that a finder may change. The copy shares the rest, which may be large.
_COPIED = (type(DataModule().hparams), torch.Generator, random.Random)


def copies(model: Module, datamodule: DataModule | None) -> tuple[Module, DataModule | None]:
    """Return a deep copy of the module, and a copy of the DataModule that shares the data.

    Raises:
        UsageError: the module cannot be copied, or a function in an attribute refers to the
            module; the copy would share this function.
    """
    data = copy.copy(datamodule)
    if data is not None:
        attributes = vars(data).items()
        vars(data).update({n: copy.deepcopy(v) for n, v in attributes if isinstance(v, _COPIED)})
    try:
        copied = copy.deepcopy(model, {id(datamodule): data} if data is not None else {})
    except Exception as error:
        raise UsageError(
            f"a finder trains a copy of the module, and {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}. "
            "Fix: make in setup() what cannot be copied, and keep tensors with .detach()"
        ) from error
    # Check the copy's functions: torchmetrics objects create theirs again when copied.
    for name, function in _functions(copied):
        if _refers_to(function, model):
            raise UsageError(
                f"a finder trains a copy of {type(model).__name__}, and the function in {name} "
                "refers to the module itself. "
                "Fix: use a method of the class instead of a lambda or nested function"
            )
    return copied, data


def _functions(model: Module) -> Iterator[tuple[str, FunctionType]]:
    """Yield (name, function) for functions in attributes and hooks of a module and submodules."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            for item in value.values() if isinstance(value, dict) else [value]:
                if isinstance(item, FunctionType):
                    yield f"{path}.{name}".lstrip("."), item


def _refers_to(function: FunctionType, model: Module) -> bool:
    """True if a variable of a function is the module, a submodule or a parameter."""
    kept = {id(thing) for thing in (*model.modules(), *model.parameters())}
    with suppress(ValueError):  # a variable that has no value yet
        outside = inspect.getclosurevars(function)
        return any(
            id(value) in kept for value in (*outside.nonlocals.values(), *outside.globals.values())
        )
    return False


@contextmanager
def same_randomness(*loaders: Any) -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch (all devices), and the loaders'."""
    stage = Stage(list(loaders))
    found = [(generator, generator.get_state()) for generator in stage.generators()]
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state()
    # Reading the state would initialise CUDA, in a process that may fork.
    initialised = _cuda_is_initialised()
    cuda = torch.cuda.get_rng_state_all() if initialised else []
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        for generator, state in found:
            generator.set_state(state)
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if mps is not None:
            torch.mps.set_rng_state(mps)
        if initialised:
            torch.cuda.set_rng_state_all(cuda)
        elif _cuda_is_initialised():
            # CUDA was initialised in between, so restore the initial state.
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


def _cuda_is_initialised() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
