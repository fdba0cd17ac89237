"""Random values of parameters that are set after they became parts: those of one process.

On a CPU torch lets each rank draw its part. Ranks with equal random numbers then have copies of one
part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

#: Operations that draw each element of a tensor alone. dropout's draw by bernoulli_ on a CPU.
DRAWS = (
    "bernoulli",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "rand_like",
    "randint_like",
    "randn_like",
    "random_",
    "uniform_",
)


@contextmanager
def as_one_process(source: int | None) -> Iterator[None]:
    """Let each rank draw whole tensors and take its part; every rank calls these operations.

    Args:
        source: the rank whose values are taken; ``None`` if all ranks draw the same.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    packets = [getattr(torch.ops.aten, name) for name in DRAWS]
    operations = [getattr(op, name) for op in packets for name in op.overloads()]
    before = dict(handlers)
    handlers.update(dict.fromkeys(operations, partial(_draw, source)))
    handlers[torch.ops.aten.any.default] = _any
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)


def _draw(source: int | None, operation: Any, args: Any, kwargs: Any) -> Any:
    parts, *values = args
    if operation is torch.ops.aten.bernoulli.default:  # of these probabilities
        like = parts.full_tensor()
    else:
        dtype = kwargs.get("dtype") or parts.dtype
        like = torch.empty(parts.shape, dtype=dtype, device=parts.device)
    whole = operation(like, *values, **kwargs)
    placements = [Replicate() if place.is_partial() else place for place in parts.placements]
    drawn: Any = distribute_tensor(whole, parts.device_mesh, placements, src_data_rank=source)
    if not operation._schema.is_mutable:
        return drawn
    if placements != list(parts.placements):
        raise NotImplementedError(f"{operation} of a sum of which ranks have parts")
    parts.to_local().copy_(drawn.to_local())
    return parts


def _any(operation: Any, args: Any, _: Any) -> torch.Tensor:
    """Return whether any element is true, on any rank; ``trunc_normal_`` asks, to draw again.

    torch's result is true or false on each rank, as its own part is.
    """
    (parts,) = args
    local = operation(parts.to_local()).to(torch.int32)
    places = [Partial("max") if place.is_shard() else Replicate() for place in parts.placements]
    result: Any = DTensor.from_local(local, parts.device_mesh, places)
    whole: torch.Tensor = result.full_tensor()
    return whole.bool()
