"""Compare a module's weights with those of a file, and load the ones that fit."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from geartrain import UsageError

#: Names in one list of a message; more are counted.
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Comparison:
    """The names of a module's ``state_dict()`` beside those of a file."""

    matched: list[str]
    #: Of the module only.
    missing: list[str]
    #: Of the file only.
    unexpected: list[str]
    #: Name -> the shapes in the file and in the module.
    shapes: dict[str, tuple[list[int], list[int]]]

    def differences(self) -> str:
        """Return a text with the names that differ; empty if none does."""
        shapes = [f"{n} {file}, here {current}" for n, (file, current) in self.shapes.items()]
        lists = (
            ("missing in the file", self.missing),
            ("only in the file", self.unexpected),
            ("of another shape", shapes),
        )
        return "; ".join(f"{title}: {_listed(names)}" for title, names in lists if names)


def compare(module: nn.Module, weights: Mapping[str, Any]) -> Comparison:
    """Compare the names and the shapes of a module's weights with others."""
    current: dict[str, Any] = module.state_dict()
    shapes = {
        name: (list(value.shape), list(current[name].shape))
        for name, value in weights.items()
        if _has_shape(value) and _has_shape(current.get(name))
    }
    differing = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    return Comparison(
        matched=[name for name in current if name in weights and name not in differing],
        missing=[name for name in current if name not in weights],
        unexpected=[name for name in weights if name not in current],
        shapes=differing,
    )


def load_matching(
    module: nn.Module, weights: Mapping[str, Any], found: Comparison, path: Path, quiet: bool
) -> None:
    """Load the weights that fit, and print which did not.

    Raises:
        UsageError: none fits.
    """
    refuse_no_match(module, found, path)
    fitting = {name: value for name, value in weights.items() if name not in found.shapes}
    module.load_state_dict(fitting, strict=False)
    if not quiet:
        print(report(found, path), file=sys.stderr, flush=True)


def refuse_no_match(module: nn.Module, found: Comparison, path: Path) -> None:
    """Refuse a file that has no weight of the module.

    Raises:
        UsageError: it has none.
    """
    if found.matched or not (found.missing or found.shapes):
        return
    hint = "load it into the class that was trained"
    if prefix := _prefix(found):
        hint = f"the names differ by {prefix!r}: rename them in the file"
    name = type(module).__name__
    raise UsageError(f"{path} has no weight that fits {name}: {found.differences()}. Fix: {hint}")


def report(found: Comparison, path: Path) -> str:
    """Return lines that say which weights of a file were loaded."""
    total = len(found.matched) + len(found.missing) + len(found.shapes)
    lines = [f"{path}: loaded {len(found.matched)} of {total} weights"]
    shapes = [f"{n} {file}, here {current}" for n, (file, current) in found.shapes.items()]
    for title, names in (
        ("missing in the file, left as they were", found.missing),
        ("only in the file, left out", found.unexpected),
        ("of another shape, left as they were", shapes),
    ):
        if names:
            lines.append(f"  {title}: {_listed(names)}")
    return "\n".join(lines)


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more


def _prefix(found: Comparison) -> str:
    """Return the text by which every missing name differs from a name of the file, as ``model.``"""
    for shorter, longer in (
        (found.missing, found.unexpected),
        (found.unexpected, found.missing),
    ):
        for name in longer[:1]:
            ends = [short for short in shorter if name.endswith(f".{short}")]
            prefix = name.removesuffix(max(ends, key=len)) if ends else ""
            if prefix and any(f"{prefix}{short}" in longer for short in shorter):
                return prefix
    return ""


def _has_shape(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_lazy(value)
