"""A Session's checkpoint: states and plain values only, so that reading it runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import match_names, not_plain


def collect(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the objects to save.

    Raises:
        UsageError: a value is not plain and has no ``state_dict()``.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            f"save: the state must be a dict of names, not {type(state).__name__}. "
            "Fix: {'model': model, 'optimizer': optimizer}"
        )
    unsupported = [
        name
        for name, value in state.items()
        if not hasattr(value, "state_dict") and not_plain(value)
    ]
    if unsupported:
        name = unsupported[0]
        raise UsageError(
            f"save: {name!r} is {type(state[name]).__name__}, which has no state_dict() and is "
            "no plain value. Fix: use numbers, strings, tensors, and lists and dicts of them"
        )
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in state.items()
    }


def apply(path: Path, found: Any, state: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Load each object in ``state`` from a file, and replace plain values.

    Returns:
        The rest of the file.

    Raises:
        TrainingError: the file is no checkpoint of a session, lacks a name, or does not fit.
    """
    if not isinstance(found, dict):
        raise TrainingError(
            f"{path} is not a checkpoint of a session: it holds {type(found).__name__}, "
            "not a dict of names"
        )
    missing = [name for name in state if name not in found]
    if missing and strict:
        raise TrainingError(
            f"{path} has no {', '.join(map(repr, missing))}; "
            f"it has {', '.join(map(repr, found))}. Fix: strict=False"
        )
    for name in [name for name in state if name in found]:
        thing = state[name]
        if not hasattr(thing, "load_state_dict"):
            state[name] = found[name]
            continue
        try:
            if isinstance(thing, nn.Module):
                match_names(found[name], thing)
            thing.load_state_dict(found[name])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(
                f"{path}: {name!r} does not fit {type(thing).__name__}: {error}"
            ) from error
    return {name: value for name, value in found.items() if name not in state}
