"""Split a batch into parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from geartrain import TrainingError
from geartrain.plugin_api import map_nested


def split(batch: Any, count: int, path: str = "batch") -> tuple[list[Any], list[int]]:
    """Split a batch along the first dimension of its tensors, as ``torch.chunk`` does.

    All parts but the last have the same size. There are fewer parts if the samples do not suffice.

    Tensors and arrays with dimensions are sliced, in any nesting of lists, tuples, named tuples,
    mappings and dataclasses. A list or tuple of plain values (text, numbers) is sliced if it has
    one value per sample. Every part gets all other objects.

    Args:
        batch: any nesting of the types above.
        count: the most parts.
        path: name of the batch in errors.

    Returns:
        The parts, and the number of samples in each. If no item has a first dimension: the batch
        itself, as one sample.

    Raises:
        TrainingError: tensors differ in their first dimension, the batch has a packed sequence, or
            an object beside the tensors holds tensors that cannot be split.
    """
    n: int | None = None
    for where, rows in _rows(batch, path):
        n = rows if n is None else n
        if rows != n:
            raise TrainingError(
                f"{where} has {rows} rows, but the batch has {n}: it cannot be split. "
                "Fix: give every tensor one row per sample; keep other tensors in a buffer of the "
                "module"
            )
    opaque = list(_opaque(batch, path))
    if n is not None and opaque:
        where, name = opaque[0]
        raise TrainingError(
            f"{where} is a {name}, whose tensors cannot be split, unlike the tensors "
            "beside it. "
            "Fix: pass its tensors in lists, dicts or dataclasses"
        )
    if not n:
        return [batch], [1]
    size = -(-n // count)
    bounds = [(start, min(start + size, n)) for start in range(0, n, size)]
    return [_slice(batch, n, start, stop) for start, stop in bounds], [
        stop - start for start, stop in bounds
    ]


def has_rows(item: Any) -> bool:
    """True if ``item`` is a tensor or array with a first dimension."""
    if isinstance(item, torch.Tensor):
        return item.ndim > 0
    return hasattr(item, "__array__") and bool(getattr(item, "shape", ()))


def is_plain(item: Any) -> bool:
    """True if ``item`` is text or a number."""
    return isinstance(item, str | bytes | Number)


def is_plain_list(data: Any, n: int) -> bool:
    """True if ``data`` is a list or tuple of ``n`` plain values, but not a named tuple."""
    return (
        isinstance(data, list | tuple)
        and not hasattr(data, "_fields")
        and len(data) == n
        and all(map(is_plain, data))
    )


def _slice(data: Any, n: int, start: int, stop: int) -> Any:
    if has_rows(data) or is_plain_list(data, n):
        return data[start:stop]
    return map_nested(data, lambda item: _slice(item, n, start, stop))


def _rows(data: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the path and the first dimension of each tensor or array that has one."""
    # A PackedSequence is a named tuple; no field has one row per sample.
    if isinstance(data, PackedSequence):
        raise TrainingError(
            f"{path} is a PackedSequence, which cannot be split. "
            "Fix: pack the sequences in the step method"
        )
    if has_rows(data):
        yield path, int(data.shape[0])
    for name, item in children(data):
        yield from _rows(item, path + name)


def _opaque(data: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and type of objects with hidden tensors: they have ``to``, but no known items."""
    if (
        callable(getattr(data, "to", None))
        and not isinstance(data, torch.Tensor)
        and not children(data)
    ):
        yield path, type(data).__name__
    for name, item in children(data):
        yield from _opaque(item, path + name)


def children(data: Any) -> list[tuple[str, Any]]:
    """Return the direct items of a nested batch, each with its path: ``['x']``, ``[0]``, ``.x``."""
    if isinstance(data, Mapping):
        return [(f"[{key!r}]", item) for key, item in data.items()]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return [(f".{name}", getattr(data, name)) for name in data._fields]
    if isinstance(data, list | tuple):
        return [(f"[{i}]", item) for i, item in enumerate(data)]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return [(f".{f.name}", getattr(data, f.name)) for f in dataclasses.fields(data) if f.init]
    return []
