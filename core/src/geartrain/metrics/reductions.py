"""``reduce_fx`` of ``self.log``: how the values of an epoch, and of all ranks, become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from geartrain.errors import TrainingError, nearest

NAMED = ("mean", "sum", "min", "max")
#: The start of an accumulator.
START = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
_FUNCTIONS: dict[Any, str] = {getattr(torch, name): name for name in NAMED}
_FUNCTIONS |= {sum: "sum", min: "min", max: "max"}


def key(reduce_fx: Any) -> str:
    """Return the name of a reduction, in lower case; ``"avg"`` is ``"mean"`` as in Lightning.

    The name of a user's function is the place of its definition: it is the same on every rank, and
    for every lambda of one line.
    """
    if not callable(reduce_fx):
        name = str(reduce_fx).lower()
        return "mean" if name == "avg" else name
    try:
        if reduce_fx in _FUNCTIONS:
            return _FUNCTIONS[reduce_fx]
    except TypeError:  # not hashable
        pass
    named = reduce_fx if hasattr(reduce_fx, "__qualname__") else type(reduce_fx)
    line = getattr(getattr(reduce_fx, "__code__", None), "co_firstlineno", "")
    return f"{named.__module__}.{named.__qualname__}:{line}"


def check(name: str, reduce_fx: Any) -> Callable[[torch.Tensor], Any] | None:
    """Return the user's own function, or ``None`` for a named reduction.

    Raises:
        TrainingError: it is neither.
    """
    if key(reduce_fx) in NAMED:
        return None
    if callable(reduce_fx):
        function: Callable[[torch.Tensor], Any] = reduce_fx
        return function
    known = f"Known: {', '.join(NAMED)}, or a function of a tensor."
    hint = nearest(reduce_fx, NAMED) if isinstance(reduce_fx, str) else known
    raise TrainingError(f"self.log({name!r}, reduce_fx={reduce_fx!r}): unknown reduction. {hint}")


def combine(reduce_fx: str, a: float, b: float) -> float:
    """Combine two totals of a named reduction."""
    if reduce_fx == "min":
        return b if b != b else min(a, b)  # NaN must win: min() would drop it silently
    if reduce_fx == "max":
        return b if b != b else max(a, b)
    return a + b


def value(reduce_fx: str, totals: list[float], weights: list[float]) -> float:
    """Return one metric's value from every rank's total; ranks of weight 0 do not count."""
    seen = [total for total, weight in zip(totals, weights, strict=True) if weight]
    if not seen:
        return float("nan")
    combined = seen[0]
    for total in seen[1:]:
        combined = combine(reduce_fx, combined, total)
    return combined / sum(weights) if reduce_fx == "mean" else combined


def apply(name: str, function: Callable[[torch.Tensor], Any], values: list[float]) -> float:
    """Call the user's function on all values, a float64 tensor ``[n]`` on the CPU.

    Raises:
        TrainingError: it returns something else than one number.
    """
    result = function(torch.tensor(values, dtype=torch.float64))
    try:
        return float(result)
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"reduce_fx={key(function)} gave {result!r}, not one number"
        raise TrainingError(f"self.log({name!r}): {message}") from error
