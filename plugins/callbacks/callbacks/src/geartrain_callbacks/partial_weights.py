"""``partial_weights``: start a run from those weights of a file that fit the module."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch

from geartrain import Run, TrainingError, hookimpl
from geartrain.plugin_api import match_names
from geartrain_callbacks.callback import PluginCallback
from geartrain_callbacks.weights import compare, refuse_no_match, report


class PartialWeights(PluginCallback):
    """Load the weights of ``checkpoint=`` that fit the module, and print which did not.

    For fine-tuning: a new head, more classes. Weights that are missing in the file or have another
    shape stay as they are; others of the file are left out. The file may also be a ``state_dict()``
    alone, as those of pretrained models. ``validate``, ``test`` and ``predict`` do the same with
    ``ckpt_path=``; a ``fit`` that resumes needs all weights.

    Args:
        prefix: added before each name of the file, as ``"backbone."``.

    Raises:
        UsageError: no weight fits.
        TrainingError: the file has no weights.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    @hookimpl(wrapper=True)
    def load_checkpoint(self, run: Run, path: Path) -> Generator[None, Any, Any]:
        state = yield
        if run.loop.start is not None and run.loop.start.resumes:
            return state
        weights = {f"{self.prefix}{name}": value for name, value in _weights(state, path).items()}
        match_names(weights, run.module)
        found = compare(run.module, weights)
        refuse_no_match(run.module, found, path)
        if run.world.rank == 0:
            print(report(found, path), file=sys.stderr, flush=True)
        fitting = {name: weights[name] for name in found.matched}
        others = state if "model" in state else {}
        return {**others, "model": {**run.module.state_dict(), **fitting}}


def _weights(state: Any, path: Path) -> Mapping[str, Any]:
    """Return the weights in the contents of a file."""
    for name in ("model", "state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            return dict(state[name])
    if isinstance(state, Mapping) and any(isinstance(v, torch.Tensor) for v in state.values()):
        return state
    raise TrainingError(
        f"{path} has no weights. Fix: use a checkpoint, or a file of torch.save(model.state_dict())"
    )
