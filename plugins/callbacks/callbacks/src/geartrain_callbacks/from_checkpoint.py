"""``Module.load_from_checkpoint``: make a module from a file's hyperparameters and weights."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from geartrain import Module, TrainingError, UsageError
from geartrain.plugin_api import (
    detect,
    match_names,
    nearest,
    overridden,
    read_checkpoint,
    user_path,
)
from geartrain_callbacks.weights import compare, load_matching

#: Arguments of Lightning's method -> the replacement.
_OF_LIGHTNING = {
    "hparams_file": "leave it out: the hyperparameters are in the checkpoint",
    "weights_only": "leave it out: files are always read in this way",
}


def load(cls: type[Module], given: str | Path, strict: bool, overrides: dict[str, Any]) -> Any:
    """Return a new module; see :meth:`geartrain.Module.load_from_checkpoint`."""
    path = user_path(given, "load_from_checkpoint", reads=True)
    state: Any = read_checkpoint(path)
    # A file of Lightning has the same under its own name.
    name = next((n for n in ("model", "state_dict") if isinstance(state, dict) and n in state), "")
    if not name or not isinstance(state[name], Mapping):
        raise TrainingError(
            f"{path} is not a checkpoint of geartrain: it has no 'model'. Fix: a file that a fit "
            "or trainer.save_checkpoint wrote; a state_dict() alone is loaded by "
            "model.load_state_dict(torch.load(FILE, weights_only=True))"
        )
    map_location = overrides.pop("map_location", None)
    module = _made(cls, path, state, overrides)
    if overridden(module, "on_load_checkpoint"):
        module.on_load_checkpoint(state)
    match_names(state[name], module)
    found = compare(module, state[name])
    if not strict:
        load_matching(module, state[name], found, path, quiet=_is_other_rank())
    else:
        try:
            module.load_state_dict(state[name])
        except RuntimeError as error:
            raise UsageError(
                f"{path}{_of(state)} does not fit {cls.__name__}: "
                f"{found.differences() or error}. Fix: load it into the class that was trained, "
                "with the same hyperparameters; or strict=False, which loads the weights that fit"
            ) from error
    if (device := _device(map_location)) is not None:
        module.to(device)
    return module


def _device(map_location: Any) -> Any:
    """Return the device that ``map_location`` of ``torch.load`` gives weights on the CPU."""
    if isinstance(map_location, Mapping):
        return map_location.get("cpu")
    if callable(map_location):
        moved = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if moved is None else moved.device
    return map_location


def _made(
    cls: type[Module], path: Path, state: dict[str, Any], overrides: dict[str, Any]
) -> Module:
    """Return a module of the class, made with the file's arguments and the user's.

    Raises:
        UsageError: an argument is missing or unknown.
    """
    signature = inspect.signature(cls.__init__)
    parameters = dict(list(signature.parameters.items())[1:])
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    if unknown := [n for n in overrides if n not in parameters and not takes_any]:
        hint = _OF_LIGHTNING.get(unknown[0]) or nearest(unknown[0], list(parameters))
        hint = hint if hint.startswith("Did") else f"Fix: {hint}"
        message = f"{cls.__name__}.__init__ has no argument {unknown[0]!r}"
        raise UsageError(f"load_from_checkpoint: {message}. {hint}")
    about, saved = state.get("module", {}), dict(state.get("hyper_parameters", {}))
    for name in {about.get("namespace"), state.get("hparams_name")} & saved.keys():
        saved[name] = Namespace(**saved[name]) if name == about.get("namespace") else saved[name]
    arguments = {n: value for n, value in saved.items() if takes_any or n in parameters}
    arguments |= overrides
    required = [
        n
        for n, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    wanted = dict.fromkeys((*required, *about.get("missing", ())))
    if missing := [n for n in wanted if n not in arguments and (takes_any or n in parameters)]:
        names = ", ".join(f"{name}=..." for name in missing)
        reason = "it has no hyperparameters"
        if "hyper_parameters" in state:
            reason = f"it has no value for {', '.join(missing)}"
            if set(missing) & set(about.get("missing", ())):
                reason += ", which was no plain value, or was left out by save_hyperparameters"
        raise UsageError(
            f"{path}{_of(state)} cannot make {cls.__name__} alone: {reason}. "
            f"Fix: {cls.__name__}.load_from_checkpoint({str(path)!r}, {names})"
        )
    bound = signature.bind_partial(None)
    extra = {name: value for name, value in arguments.items() if name not in parameters}
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.arguments[name] = extra
        elif name in arguments:
            bound.arguments[name] = arguments[name]
    try:
        return cls(*bound.args[1:], **bound.kwargs)
    except Exception as error:
        error.add_note(f"{cls.__name__} was made with the hyperparameters of {path}{_of(state)}")
        raise


def _of(state: dict[str, Any]) -> str:
    """Return the class that was saved, for errors."""
    name = state.get("module", {}).get("class", "")
    return f", of {name}," if name else ""


def _is_other_rank() -> bool:
    place = detect()
    return place is not None and place.rank != 0
