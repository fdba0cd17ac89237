"""The file predictions.pt: the return values of ``predict_step``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from geartrain import TrainingError
from geartrain.plugin_api import replacing


def save_predictions(outputs: list[Any], path: Path) -> None:
    """Write predictions to a file, completely or not at all.

    ``torch.load(path, weights_only=True)`` reads nested tensors, numbers and strings.

    Raises:
        TrainingError: an output cannot be pickled, or the file cannot be written.
    """
    try:
        with replacing(path) as file:
            torch.save(outputs, file)
    except TrainingError:
        raise
    except Exception as error:
        number = next(
            (number for number, output in enumerate(outputs) if not _can_be_pickled(output)), 0
        )
        raise TrainingError(
            f"{path} was not written: output {number}, of type "
            f"{type(outputs[number]).__qualname__}, cannot be pickled "
            f"({type(error).__name__}: {error}). Fix: let predict_step return tensors, numbers, "
            "strings, and lists, tuples and dicts of them"
        ) from error


def _can_be_pickled(output: Any) -> bool:
    try:
        pickle.dumps(output, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True
