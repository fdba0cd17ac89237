"""Find out if an optimizer can step parts of parameters, before it steps those of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

#: Returns the parts of a value that this rank has, as it has those of a parameter.
Split = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]


def steps_in_parts(optimizer: Optimizer, split: Split, ranks: int, has_closure: bool) -> bool:
    """Return whether parts of parameters get the values that an optimizer gives whole ones.

    A new optimizer of its class, with its options, takes two steps of small random parameters,
    whole and in parts.

    Args:
        optimizer: of the run.
        split: called with a parameter of the optimizer, and a whole value of fewer elements.
        ranks: the number of ranks that have parts.
        has_closure: True if its ``step`` needs a closure.

    Returns:
        True also if it cannot be tried: if its class needs other arguments than groups of
        parameters, or cannot step whole parameters either.
    """
    likes = [_kinds(group["params"], ranks) for group in optimizer.param_groups]
    device = next((like.device for group in likes for like, _ in group), torch.device("cpu"))
    closure = [lambda: torch.zeros(())] if has_closure else []

    def step(split: Split) -> list[torch.Tensor]:
        """Return the changes of all parts."""
        torch.manual_seed(0)  # the same values, and the same noise if the optimizer draws some
        groups, parts, before = [], [], []
        for group, kinds in zip(optimizer.param_groups, likes, strict=True):
            parameters = []
            for like, shape in kinds:
                value, gradient = (
                    split(like, 0.1 * torch.randn(shape).to(like.device, like.dtype))
                    for _ in range(2)
                )
                for part, grad in zip(value, gradient, strict=True):
                    parameters.append(nn.Parameter(part.clone()))
                    parameters[-1].grad = grad
                    before.append(part)
            parts += parameters
            rate = {"lr": 1e-3} if group.get("lr") == 0 else {}
            groups.append({**group, **rate, "params": parameters})
        copy: Any = type(optimizer)(groups)  # type: ignore[call-arg]
        for _ in range(2):
            copy.step(*closure)
        return [part.detach() - value for part, value in zip(parts, before, strict=True)]

    kind = device.type
    with torch.random.fork_rng([] if kind == "cpu" else [device], device_type=kind):
        try:
            whole = step(lambda _, value: [value])
        except Exception:
            return True
        try:
            found = step(split)
        except Exception:
            return False
    all_likes = [like for kinds in likes for like, _ in kinds]
    expected = [p for like, value in zip(all_likes, whole, strict=True) for p in split(like, value)]
    return all(map(_is_close, found, expected))


def _kinds(
    parameters: Sequence[torch.Tensor], ranks: int
) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """Return a parameter of each kind, and a small shape of this kind.

    The length of a dimension is divided by the number of ranks with the same remainder.
    """
    kinds: dict[Any, tuple[torch.Tensor, tuple[int, ...]]] = {}
    for like in parameters:
        shape = tuple(min(size, 2 * ranks + size % ranks) for size in like.shape)
        kinds.setdefault((shape, like.dtype, str(getattr(like, "placements", ""))), (like, shape))
    return list(kinds.values())


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    a, b = (t.to_local() if isinstance(t, DTensor) else t for t in (found, expected))
    most = float(b.abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=0.01 * most + torch.finfo(b.dtype).eps)
