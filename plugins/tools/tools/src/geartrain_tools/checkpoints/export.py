"""``geartrain ckpt export``: write a checkpoint's weights for other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import nearest, replacing, user_path
from geartrain_tools.checkpoints.contents import mapping, plan_of

FORMATS = ("state_dict", "safetensors", "hf")
WEIGHTS = ("average", "trained")
#: Ending of a file -> the format that it has if none is given.
_ENDINGS = {".safetensors": "safetensors", ".pt": "state_dict", ".pth": "state_dict"}


def format_of(given: str | None, out: Path) -> str:
    """Return the format to write.

    Raises:
        UsageError: it is unknown, or neither given nor clear from the file's ending.
    """
    if given is None and out.suffix in _ENDINGS:
        return _ENDINGS[out.suffix]
    if given is None:
        raise UsageError(f"no format is given for {out}. Fix: --format {'|'.join(FORMATS)}")
    if given not in FORMATS:
        raise UsageError(
            f"--format {given} is unknown. {nearest(given, FORMATS)} Fix: --format "
            f"{'|'.join(FORMATS)}"
        )
    return given


def check_target(out: Path, kind: str) -> None:
    """Refuse to replace anything.

    Raises:
        UsageError: the file or folder exists; or safetensors is needed, and not installed.
    """
    if kind != "state_dict":
        _safetensors()
    is_empty = kind == "hf" and out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty:
        raise UsageError(f"{out} exists and is not replaced. Fix: use another name, or remove it")


def chosen_weights(state: Mapping[str, Any], which: str | None) -> dict[str, Any]:
    """Return the averaged or the trained weights; ``None``: those that ``test`` loads.

    Raises:
        UsageError: the checkpoint has only one kind.
    """
    model = dict(mapping(state["model"]))
    if which is None:
        return model
    if which not in WEIGHTS:
        raise UsageError(f"--weights {which} is unknown. Fix: --weights {'|'.join(WEIGHTS)}")
    if isinstance(state.get("trained"), dict):
        return dict(state["trained"]) if which == "trained" else model
    if isinstance(state.get("average"), dict):
        return dict(state["average"]) if which == "average" else model
    raise UsageError(
        "the checkpoint has no averaged weights: no plugin such as ema saved it. Fix: leave out "
        "--weights"
    )


def part_of(weights: dict[str, Any], submodule: str | None) -> dict[str, Any]:
    """Return the weights of one submodule, named as in it.

    Raises:
        UsageError: there is no such submodule.
    """
    if submodule is None:
        return weights
    start = f"{submodule}."
    found = {n.removeprefix(start): v for n, v in weights.items() if n.startswith(start)}
    if not found:
        known = sorted({name.partition(".")[0] for name in weights if "." in name})
        raise UsageError(
            f"--submodule {submodule}: no weight begins with {start!r}. "
            f"{nearest(submodule, known)} Fix: use one of {', '.join(known) or 'none'}"
        )
    return found


def plain_tensors(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors as safetensors can hold them: contiguous, and each with its own memory.

    Raises:
        UsageError: a value is no tensor.
    """
    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise UsageError(
            f"safetensors holds only tensors, and {others[0]!r} is none. Fix: --format state_dict"
        )
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        is_shared = place in seen or not whole  # tied weights; a view of a larger tensor
        seen.add(place)
        tensor = tensor.detach()
        tensors[name] = tensor.contiguous().clone() if is_shared else tensor.contiguous()
    return tensors


def config_of(state: Mapping[str, Any], given: str | None) -> dict[str, Any]:
    """Return the contents of config.json: a file's, or the module's hyperparameters.

    Raises:
        UsageError: the file cannot be read.
    """
    if given is None:
        values = state.get("hyper_parameters")
        if isinstance(values, dict):
            return {n: v for n, v in values.items() if _is_json(v)}
        values = mapping(plan_of(state).get("hyperparameters"))  # saved without geartrain-callbacks
        return {n: v for n, v in values.items() if not n.startswith("data.")}
    path = user_path(given, "--config")
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise UsageError(
            f"--config {path} cannot be read: {reason}. Fix: pass the model's config.json"
        ) from error
    if not isinstance(config, dict):
        raise UsageError(f"--config {path} has no object. Fix: pass the model's config.json")
    return config


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def write(weights: Mapping[str, Any], config: Mapping[str, Any], out: Path, kind: str) -> None:
    """Write the file or the folder.

    Raises:
        TrainingError: it cannot be written.
    """
    if kind == "state_dict":
        tensors = {n: _compact(v) if isinstance(v, torch.Tensor) else v for n, v in weights.items()}
        with replacing(out) as file:
            torch.save(tensors, file)
        return
    tensors = plain_tensors(weights)
    target = out / "model.safetensors" if kind == "hf" else out
    with replacing(target) as file:
        try:
            file.write(_safetensors().save(tensors, metadata={"format": "pt"}))
        except (ValueError, RuntimeError, KeyError) as error:  # a dtype that it lacks
            raise TrainingError(
                f"safetensors cannot hold these weights: {error}. Fix: --format state_dict"
            ) from error
    if kind == "hf":
        with replacing(out / "config.json") as file:
            file.write(f"{json.dumps(config, indent=2)}\n".encode())


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has nothing else: torch saves the whole memory."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor.detach() if whole else tensor.detach().clone()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError(
            "this format needs safetensors, which is not installed. Fix: pip install "
            "'geartrain-tools[safetensors]'"
        ) from error
    return safetensors.torch
