"""Combine the outputs of the parts into the output of one process for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from geartrain import TrainingError
from geartrain.plugin_api import map_nested
from geartrain_dp.split import children, has_rows, is_plain_list


def combine(method: str, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Combine the outputs of a step method that has no ``*_step_end``.

    0-d floating tensors and floats become their mean, weighted by the samples in each part; tensors with rows, and lists of plain
    values, are concatenated; mappings, lists, tuples and dataclasses are combined item by item; ``None`` stays ``None``, and
    other values stay where they are equal in all parts.

    Args:
        outputs: one a part, on one device.
        sizes: the samples in each part.

    Raises:
        TrainingError: a value has no defined meaning for the whole batch. Whole numbers have none: counts would have to be
            added, identities kept.
    """
    return outputs[0] if len(outputs) == 1 else _combine(method, method, list(outputs), sizes)


def _combine(method: str, path: str, values: list[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        _unclear(
            method,
            path,
            f"is {' and '.join(dict.fromkeys(type(value).__name__ for value in values))} in different parts",
        )
    if isinstance(first, torch.Tensor) and first.ndim == 0:
        if not (first.is_floating_point() or first.is_complex()) or any(
            value.ndim for value in values
        ):
            _unclear(method, path, "is one number in each part, and no floating one")
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
        _unclear(method, path, f"is a whole number in each part ({', '.join(map(str, values))})")
    if has_rows(first) or not all(_equal(first, value) for value in values):
        _unclear(method, path, f"({type(first).__name__}) is not the same in all parts")
    return first


def _mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def _cat(
    method: str, path: str, values: Sequence[torch.Tensor], sizes: Sequence[int]
) -> torch.Tensor:
    """Concatenate, where rows belong to samples: a confusion matrix has as many rows for a part as for the whole."""
    rows = [value.shape[0] if value.ndim else 0 for value in values]
    a_sample = rows[0] // sizes[0]
    if method != "predict_step" and rows != [a_sample * size for size in sizes]:
        _unclear(method, path, f"has {rows} rows in parts of {list(sizes)} samples")
    if len({value.shape[1:] for value in values}) > 1:
        _unclear(
            method, path, f"has the shapes {[list(value.shape) for value in values]} in its parts"
        )
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
        odd = next(name for items in by_name for name in by_name[0].keys() ^ items.keys())
        _unclear(method, path + odd, "is not in all parts")
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
    except Exception:  # whatever an object's own == does
        return False


def _unclear(method: str, path: str, what: str) -> NoReturn:
    where = f"what {method} returned" + (
        f" under {path.removeprefix(method)}" if path != method else ""
    )
    fix = (
        "return tensors, which are concatenated"
        if method == "predict_step"
        else f"define {method}_end(outputs), which gets every part's"
    )
    raise TrainingError(
        f"{where} {what}, so it cannot be put together for the whole batch. Fix: {fix}"
    )
