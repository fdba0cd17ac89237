"""Time torch's fused step of an optimizer on copies of its parameters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

#: The most elements that are copied: 16 MB in float32.
_MOST_ELEMENTS = 4_000_000
_WARM_UP, _ROUNDS, _STEPS = 3, 10, 3
#: The most seconds of all rounds.
_MOST_SECONDS = 2.0


def time_fused(
    optimizer: Optimizer, stepper: Callable[[Optimizer], Callable[[], Any]]
) -> tuple[float, float] | None:
    """Return the seconds of a step without and with ``fused=True``, medians of alternate rounds.

    The copies have the first parameters with gradients, at most 4 million elements, and those
    gradients. The optimizer itself does not change.

    Args:
        optimizer: before its first step, with gradients.
        stepper: takes an optimizer, and returns the function that steps it.

    Returns:
        ``None`` if torch has no fused step for it, if it has no gradients, or if the user has set
        ``fused`` or ``foreach``.
    """
    if type(optimizer) not in (SGD, Adam, AdamW) or any(
        group.get(name) is not None
        for group in optimizer.param_groups
        for name in ("fused", "foreach")
    ):
        return None
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        return None
    try:
        steps = [stepper(_copy(optimizer, fused)) for fused in (None, True)]
        for step in steps * _WARM_UP:
            step()
    except RuntimeError:  # as for sparse gradients, complex parameters, and some devices
        return None
    device = optimizer.param_groups[0]["params"][0].device
    seconds: list[list[float]] = [[], []]
    start = time.perf_counter()
    while len(seconds[1]) < _ROUNDS and (
        not seconds[1] or time.perf_counter() - start < _MOST_SECONDS
    ):
        for step, kept in zip(steps, seconds, strict=True):
            _wait_for(device)
            begin = time.perf_counter()
            for _ in range(_STEPS):
                step()
            _wait_for(device)
            kept.append((time.perf_counter() - begin) / _STEPS)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _copy(optimizer: Optimizer, fused: bool | None) -> Optimizer:
    """Return a new optimizer of the same class, options and gradients."""
    groups: list[dict[str, Any]] = []
    room = _MOST_ELEMENTS
    for options in optimizer.param_groups:
        copies: list[nn.Parameter] = []
        for parameter in options["params"]:
            if parameter.grad is None or (room < parameter.numel() and (groups or copies)):
                continue
            room -= parameter.numel()
            copies.append(nn.Parameter(parameter.detach().clone()))
            copies[-1].grad = parameter.grad.detach().clone()
        if copies:
            groups.append({**options, "params": copies, "fused": fused})
    made: Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]
    return made


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
