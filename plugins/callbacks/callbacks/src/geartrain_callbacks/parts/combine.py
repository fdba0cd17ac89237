"""Combine the outputs of the parts into the output of one process for the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from geartrain import TrainingError
from geartrain.plugin_api import map_nested, reductions
from geartrain_callbacks.parts.split import children, has_rows, is_plain_list


def combine(method: str, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Combine the outputs of a step method that has no ``*_step_end``.

    - 0-d floating tensors and floats: the mean, weighted by the samples in each part.
    - Tensors with rows, and lists of plain values: concatenated.
    - ``{"loss": ..., "weight": ...}`` of ``training_step``: sums of both.
    - Mappings, lists, tuples and dataclasses: combined item by item.
    - Other values, ``None`` included: kept if they are equal in all parts.

    Args:
        method: name of the step method, for messages.
        outputs: one output per part, all on one device.
        sizes: number of samples in each part.

    Returns:
        The output for the whole batch, on the device of the outputs.

    Raises:
        TrainingError: a value has no defined meaning for the whole batch. This includes integers:
            counts would have to be added, but indices would not.
    """
    if len(outputs) == 1:
        return outputs[0]
    sums: dict[str, Any] = {}
    if method == "training_step" and all(
        isinstance(output, Mapping) and output.keys() >= {"loss", "weight"} for output in outputs
    ):
        sums = {name: sum(output[name] for output in outputs) for name in ("loss", "weight")}
        outputs = [
            {name: output[name] for name in output.keys() - sums.keys()} for output in outputs
        ]
    combined = _combine(method, method, list(outputs), sizes)
    return {**combined, **sums} if sums else combined


def combine_logged(
    values: Sequence[Any], weights: Sequence[int], reduce_fx: Any, device: torch.device
) -> Any:
    """Combine numbers that parts logged, in float64. Tensors stay on ``device``, and nothing waits.

    Args:
        values: floats, or tensors of one element.
        weights: in a mean.
        reduce_fx: of ``self.log``; an unknown one counts as a mean, and core refuses it.
    """
    on_device = any(isinstance(value, torch.Tensor) for value in values)
    place = device if on_device else torch.device("cpu")
    stacked = torch.stack(
        [torch.as_tensor(value).to(place, torch.float64).reshape(()) for value in values]
    )
    match reductions.key(reduce_fx):
        case "sum":
            combined = stacked.sum()
        case "min":
            combined = stacked.amin()  # NaN wins, as in core
        case "max":
            combined = stacked.amax()
        case _:
            shares = (value * weight for value, weight in zip(stacked, weights, strict=True))
            combined = sum(shares, stacked.new_zeros(())) / (sum(weights) or 1)
    return combined if on_device else combined.item()


def _combine(method: str, path: str, values: list[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        types = " and ".join(dict.fromkeys(type(value).__name__ for value in values))
        _unclear(method, path, f"is {types} in different parts")
    if isinstance(first, torch.Tensor) and first.ndim == 0:
        if not (first.is_floating_point() or first.is_complex()) or any(
            value.ndim for value in values
        ):
            _unclear(method, path, "is a number in each part, but not a floating-point number")
        return _mean(values, sizes)
    if isinstance(first, torch.Tensor):
        return _cat(method, path, values, sizes)
    if isinstance(first, float):
        return _mean(values, sizes)
    if all(is_plain_list(value, size) for value, size in zip(values, sizes, strict=True)):
        return sum(values[1:], start=first)
    inner = [children(value) for value in values]
    if inner[0]:
        return _nested(method, path, values, inner, sizes)
    if isinstance(first, int) and not isinstance(first, bool):
        _unclear(method, path, f"is an integer in each part ({', '.join(map(str, values))})")
    if has_rows(first) or not all(_equal(first, value) for value in values):
        _unclear(method, path, f"({type(first).__name__}) is not the same in all parts")
    return first


def _mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def _cat(
    method: str, path: str, values: Sequence[torch.Tensor], sizes: Sequence[int]
) -> torch.Tensor:
    """Concatenate if rows belong to samples. A confusion matrix has the same rows for any part."""
    rows = [value.shape[0] if value.ndim else 0 for value in values]
    a_sample = rows[0] // sizes[0]
    if method != "predict_step" and rows != [a_sample * size for size in sizes]:
        _unclear(method, path, f"has {rows} rows in parts of {list(sizes)} samples")
    if len({value.shape[1:] for value in values}) > 1:
        shapes = [list(value.shape) for value in values]
        _unclear(method, path, f"has the shapes {shapes} in its parts")
    return torch.cat(list(values))


def _nested(
    method: str,
    path: str,
    values: list[Any],
    inner: list[list[tuple[str, Any]]],
    sizes: Sequence[int],
) -> Any:
    by_name = [dict(items) for items in inner]
    if any(items.keys() != by_name[0].keys() for items in by_name):
        missing = next(name for items in by_name for name in by_name[0].keys() ^ items.keys())
        _unclear(method, path + missing, "is not in all parts")
    done = iter(
        [
            _combine(method, path + name, [items[name] for items in by_name], sizes)
            for name in by_name[0]
        ]
    )
    return map_nested(values[0], lambda _: next(done))


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # an object's == may raise anything
        return False


def _unclear(method: str, path: str, what: str) -> NoReturn:
    where = f"the output of {method}"
    if path != method:
        where += f" under {path.removeprefix(method)}"
    hint = (
        "return tensors, which are concatenated"
        if method == "predict_step"
        else f"define {method}_end(outputs), which gets the outputs of all parts"
    )
    raise TrainingError(f"{where} {what}, so the parts cannot be combined. Fix: {hint}")
