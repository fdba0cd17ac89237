"""``geartrain ckpt diff``: the tensors and settings in which two checkpoints differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from geartrain_cli.tables import Group
from geartrain_tools.checkpoints.contents import leaves, mapping, plan_of, ranks_of, sequence
from geartrain_tools.checkpoints.text import table

#: Rows of each table; ``--json`` has all.
_ROWS = 40
_MISSING = object()


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differences of two checkpoints.

    Returns:
        ``equal``; ``tensors``: name, change, max_abs_diff (``None`` if they cannot be subtracted),
        largest first; ``settings``: name, and both values; ``equal_tensors``: how many.
    """
    of_a, of_b = dict(_named(first)), dict(_named(second))
    tensors: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    equal = 0
    for name in {**of_a, **of_b}:
        a, b = of_a.get(name, _MISSING), of_b.get(name, _MISSING)
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            difference = _tensor_difference(name, a, b)
            equal += difference is None
            tensors += [difference] if difference is not None else []
        elif a is _MISSING or b is _MISSING or not _same(a, b):
            settings.append({"name": name, "a": _value(a), "b": _value(b)})
    tensors.sort(key=lambda row: -(row["max_abs_diff"] or 0.0))
    for name, a, b in _random_states(first, second):
        if not _same(a, b):
            settings.append({"name": name, "a": "its own", "b": "another"})
    return {
        "equal": not tensors and not settings,
        "tensors": tensors,
        "equal_tensors": equal,
        "settings": settings,
    }


def _named(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each value of a checkpoint by name, without the random states.

    The state of an optimizer is named after parameters instead of their numbers.
    """
    fit = mapping(state.get("fit"))
    outer = {key: value for key, value in state.items() if key not in ("fit", "plan")}
    yield from leaves(outer)
    plan = {key: value for key, value in plan_of(state).items() if key != "passed_over"}
    yield from leaves({"plan": plan} if plan else {})
    inner = {key: value for key, value in fit.items() if key not in ("optimizers", "ranks")}
    yield from leaves({"fit": inner} if inner else {})
    for index, optimizer in enumerate(sequence(fit.get("optimizers"))):
        item = mapping(optimizer)
        names: dict[Any, Any] = dict(enumerate(sequence(item.get("parameters"))))
        saved = mapping(item.get("state"))
        slots = {names.get(k) or k: value for k, value in mapping(saved.get("state")).items()}
        groups = [
            {key: value for key, value in mapping(group).items() if key != "params"}
            for group in sequence(saved.get("param_groups"))
        ]
        contents = {"class": item.get("class"), "parameters": list(names.values())}
        contents |= {"groups": groups, "state": slots}
        yield from leaves(contents, f"optimizers.{index}")
    for index, rank in enumerate(ranks_of(state)):
        kept = {key: value for key, value in rank.items() if key not in ("random", "began")}
        yield from leaves(kept, f"ranks.{index}")


def _random_states(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    pairs = zip(ranks_of(first), ranks_of(second), strict=False)
    for index, (a, b) in enumerate(pairs):
        yield f"ranks.{index}.random", a.get("random"), b.get("random")


def _tensor_difference(name: str, a: Any, b: Any) -> dict[str, Any] | None:
    row: dict[str, Any] = {"name": name, "change": "", "max_abs_diff": None}
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if a is _MISSING or b is _MISSING:
            return row | {"change": "only in B" if a is _MISSING else "only in A"}
        return row | {"change": "a tensor in only one of them"}
    if a.shape != b.shape:
        return row | {"change": f"shape {list(a.shape)} -> {list(b.shape)}"}
    change = "" if a.dtype == b.dtype else f"{a.dtype} -> {b.dtype}".replace("torch.", "")
    if not change and _same(a, b):
        return None
    try:
        return row | {"change": change or "values", "max_abs_diff": _largest(a, b)}
    except (RuntimeError, TypeError):  # a kind of tensor that torch cannot subtract
        return row | {"change": change or "values"}


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference; NaN at one place of both is no difference."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    both_nan = torch.isnan(a) & torch.isnan(b)
    apart = (a - b).abs()
    apart[both_nan | (a == b)] = 0.0  # infinity - infinity
    return float(apart.max()) if apart.numel() else 0.0


def _same(a: Any, b: Any) -> bool:
    """True if two values of checkpoints are equal; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        try:
            return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
        except (RuntimeError, TypeError):
            return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    return bool(a == b) or (a != a and b != b)


def _value(value: Any) -> Any:
    if value is _MISSING:
        return "-"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def diff_tables(facts: Mapping[str, Any]) -> list[Group]:
    """Return the tables of ``geartrain ckpt diff``."""
    tensors = [
        (
            row["name"],
            row["change"],
            "-" if row["max_abs_diff"] is None else f"{row['max_abs_diff']:.6g}",
        )
        for row in facts["tensors"]
    ]
    settings = [(row["name"], row["a"], row["b"]) for row in facts["settings"]]
    return [
        table("tensors", _cut(tensors), ("change", "largest difference")),
        table("settings", _cut(settings), ("A", "B")),
    ]


def _cut(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    more = len(rows) - _ROWS
    return rows if more <= 0 else [*rows[:_ROWS], (f"and {more} more, which --json lists", "", "")]


def verdict(facts: Mapping[str, Any]) -> str:
    """Return the line above the tables."""
    if facts["equal"]:
        return f"the same contents: {facts['equal_tensors']} tensors are equal"
    changed, same = len(facts["tensors"]), facts["equal_tensors"]
    return f"{changed} tensors differ, {same} are equal; {len(facts['settings'])} settings differ"
