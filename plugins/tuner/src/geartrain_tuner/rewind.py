"""Put a module back exactly as it was: a finder trains the caller's own module, and none of that training may stay."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from geartrain import DataModule
from geartrain.plugin_api import HyperParameters, generators

#: Puts one thing back as it was when this was made, and returns it; may be called several times.
_Rewinder = Callable[[], Any]
_GENERATORS = (torch.Generator, random.Random)


class ModuleSnapshot:
    """What a run may change of these things, as it is now; :meth:`__call__` puts it back, as often as it is called.

    Parameters, buffers and gradients come back bit for bit, in the same storage and on the same device; so do attributes, those of
    submodules and of optimizers among them, with what lists, dicts, sets and tensors hold, and the generators of loaders. Of a
    DataModule and of objects of other classes only the names come back: what they refer to is not copied, because it may be all the data.

    Args:
        module: the user's module.
        others: a DataModule and loaders; ``None`` is left out.
    """

    def __init__(self, module: nn.Module, *others: Any) -> None:
        seen: set[int] = set()
        self._rewinders = [_rewinder(module, seen)]
        for other in others:
            if isinstance(other, DataModule):
                self._rewinders.append(_names(other, seen))
            self._rewinders += [_rewinder(generator, seen) for generator in generators(other)]

    def __call__(self) -> None:
        with torch.no_grad():
            for rewinder in self._rewinders:
                rewinder()


def _rewinder(value: Any, seen: set[int]) -> _Rewinder:
    """How to put ``value`` back; what was seen already is put back by whoever saw it first."""
    if id(value) in seen:
        return _as_it_is(value)
    if isinstance(value, torch.Tensor):
        seen.add(id(value))
        return _tensor(value, seen)
    if isinstance(value, nn.Module | Optimizer | LRScheduler):
        seen.add(id(value))
        return _attributes(value, seen)
    if isinstance(value, _GENERATORS):
        return _generator(value)
    if isinstance(value, dict | list | set | deque):
        seen.add(id(value))
        return _container(value, seen)
    if isinstance(value, tuple):
        inner = [_rewinder(item, seen) for item in value]
        return lambda: ([put() for put in inner], value)[1]
    return _of_numpy(value)


def _of_numpy(value: Any) -> _Rewinder:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.flags.writeable:
        array = value.copy()
        return lambda: (value.__setitem__(..., array), value)[1]
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits, state = value.bit_generator, value.bit_generator.state

        def put() -> Any:
            bits.state = state
            return value

        return put
    return _as_it_is(value)


def _tensor(tensor: torch.Tensor, seen: set[int]) -> _Rewinder:
    # The storage itself is kept as well: a module that was moved to a device and back would lose tied and flattened weights.
    # Copies lie on the CPU, because the batch-size finder asks how much room there is on the device.
    storage, copy = tensor.data, tensor.detach().to("cpu", copy=True)
    gradient = tensor.grad if tensor.is_leaf else None
    of_gradient = None if gradient is None else _rewinder(gradient, seen)
    expanded = torch._debug_has_internal_overlap(storage) == 1  # cannot be written to, so nobody did

    def put() -> torch.Tensor:
        if not expanded:
            storage.copy_(copy)
        tensor.data = storage
        if tensor.is_leaf:
            tensor.grad = of_gradient() if of_gradient is not None else None
        return tensor

    return put


def _attributes(thing: Any, seen: set[int]) -> _Rewinder:
    inner = {name: _rewinder(value, seen) for name, value in vars(thing).items()}
    return _put_names(thing, inner)


def _names(thing: Any, seen: set[int]) -> _Rewinder:
    small = (*_GENERATORS, HyperParameters)
    kept = {name: _rewinder(value, seen) if isinstance(value, small) else _as_it_is(value) for name, value in vars(thing).items()}
    return _put_names(thing, kept)


def _as_it_is(value: Any) -> _Rewinder:
    return lambda: value


def _put_names(thing: Any, inner: dict[str, _Rewinder]) -> _Rewinder:
    def put() -> Any:
        found = {name: rewinder() for name, rewinder in inner.items()}
        vars(thing).clear()
        vars(thing).update(found)
        return thing

    return put


def _container(value: Any, seen: set[int]) -> _Rewinder:
    if isinstance(value, dict):
        items = {key: _rewinder(item, seen) for key, item in value.items()}

        def fill() -> None:
            value.update({key: put() for key, put in items.items()})

    else:
        inner = [_rewinder(item, seen) for item in value]

        def fill() -> None:
            (value.update if isinstance(value, set) else value.extend)([put() for put in inner])

    def put() -> Any:
        value.clear()
        fill()
        return value

    return put


def _generator(value: torch.Generator | random.Random) -> _Rewinder:
    if isinstance(value, torch.Generator):
        state, set_state = value.get_state(), value.set_state
        return lambda: (set_state(state), value)[1]
    if isinstance(value, random.SystemRandom):  # has no state
        return _as_it_is(value)
    told, tell = value.getstate(), value.setstate
    return lambda: (tell(told), value)[1]


# --- global generators ---------------------------------------------------------------------------------------------------


@contextmanager
def same_randomness() -> Iterator[None]:
    """Python's, NumPy's and torch's global generators, on every device, are afterwards as they were before."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state()
    initialised = _cuda_is_initialised()  # asking for a state would initialise it, here in a process that may fork
    cuda = torch.cuda.get_rng_state_all() if initialised else []
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if mps is not None:
            torch.mps.set_rng_state(mps)
        if initialised:
            torch.cuda.set_rng_state_all(cuda)
        elif _cuda_is_initialised():
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())  # to the beginning, where it stood before anybody asked it


def _cuda_is_initialised() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
