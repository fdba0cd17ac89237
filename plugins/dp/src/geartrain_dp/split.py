"""A batch -> one part for each device."""

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
    """Split a batch along the first dimension of its tensors, as ``torch.chunk`` does: equal parts but for the last, and fewer
    if the samples do not suffice.

    Tensors and arrays with dimensions are sliced, in any nesting of lists, tuples, named tuples, mappings and dataclasses, and so
    is a list or tuple of plain values (text, numbers) that has one for each sample. Everything else goes to every part.

    Args:
        count: the most parts, one for each device.
        path: what errors call the batch.

    Returns:
        The parts, and the samples in each; the batch itself, with one sample, if nothing in it has a first dimension.

    Raises:
        TrainingError: tensors with different first dimensions, a packed sequence, or an object beside the tensors that keeps tensors
            of its own if they cannot be split.
    """
    n: int | None = None
    for where, rows in _rows(batch, path):
        n = rows if n is None else n
        if rows != n:
            raise TrainingError(
                f"{where} has {rows} rows where the batch has {n}: it cannot be split over devices. "
                "Fix: give every tensor one row a sample, or keep what is no sample's in a buffer of the module"
            )
    opaque = list(_opaque(batch, path))
    if n is not None and opaque:
        where, name = opaque[0]
        raise TrainingError(
            f"{where} is a {name}, whose tensors cannot be split over devices as those beside it are. "
            "Fix: give them as tensors, in lists, dicts or dataclasses, or use --strategy ddp"
        )
    if not n:
        return [batch], [1]
    size = -(-n // count)
    bounds = [(start, min(start + size, n)) for start in range(0, n, size)]
    return [_slice(batch, n, start, stop) for start, stop in bounds], [
        stop - start for start, stop in bounds
    ]


def has_rows(item: Any) -> bool:
    """True if it is a tensor or array with a first dimension."""
    if isinstance(item, torch.Tensor):
        return item.ndim > 0
    return hasattr(item, "__array__") and bool(getattr(item, "shape", ()))


def is_plain(item: Any) -> bool:
    """True if it is text or a number."""
    return isinstance(item, str | bytes | Number)


def is_plain_list(data: Any, n: int) -> bool:
    """True if it is a list or tuple of ``n`` plain values; a named tuple has fields, not samples."""
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
    """Where each tensor or array with a first dimension stands, and that dimension."""
    if isinstance(
        data, PackedSequence
    ):  # a named tuple whose fields have unlike first dimensions, none of them the samples'
        raise TrainingError(
            f"{path} is a PackedSequence, which cannot be split over devices. Fix: pack it in the step method"
        )
    if has_rows(data):
        yield path, int(data.shape[0])
    for name, item in children(data):
        yield from _rows(item, path + name)


def _opaque(data: Any, path: str) -> Iterator[tuple[str, str]]:
    """Return the places and types of objects that hold tensors in their own way, such as those that can be moved to a device."""
    if (
        callable(getattr(data, "to", None))
        and not isinstance(data, torch.Tensor)
        and not children(data)
    ):
        yield path, type(data).__name__
    for name, item in children(data):
        yield from _opaque(item, path + name)


def children(data: Any) -> list[tuple[str, Any]]:
    """Yield the leaves of a nested batch, each with its path: ``['x']``, ``[0]``, ``.x``."""
    if isinstance(data, Mapping):
        return [(f"[{key!r}]", item) for key, item in data.items()]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return [(f".{name}", getattr(data, name)) for name in data._fields]
    if isinstance(data, list | tuple):
        return [(f"[{i}]", item) for i, item in enumerate(data)]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return [(f".{f.name}", getattr(data, f.name)) for f in dataclasses.fields(data) if f.init]
    return []
