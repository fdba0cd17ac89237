"""Give every step's output of an epoch to the module: ``training_epoch_end(outputs)`` and the like.

A module with such a method adds the plugin to its runs. Outputs are those of this rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from geartrain import Run, hookimpl
from geartrain.plugin_api import map_tensors, warn

#: Stage -> the module's method that gets all outputs of an evaluation.
_METHODS = {"test": "test_epoch_end"}
_METHODS |= dict.fromkeys(("validate", "sanity_check"), "validation_epoch_end")


class TrainingOutputs:
    """Calls ``training_epoch_end`` with the detached results of ``training_step``."""

    added_for = "a module with training_epoch_end"

    def __init__(self) -> None:
        self._outputs: list[Any] = []

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        self._outputs = []
        resumed = run.loop.resumed
        if resumed is not None and resumed.batch_idx and run.world.rank == 0:
            message = f"training_epoch_end gets the outputs from batch {resumed.batch_idx}"
            message = f"{message} of this epoch on: those before are gone"
            warn(message)

    @hookimpl
    def on_train_batch_end(self, outputs: Any) -> None:
        self._outputs.append(map_tensors(outputs, torch.Tensor.detach))

    @hookimpl
    def on_train_epoch_end(self, run: Run) -> None:
        outputs, self._outputs, module = self._outputs, [], cast("Any", run.module)
        module.training_epoch_end(outputs)


class EvaluationOutputs:
    """Calls ``validation_epoch_end`` and ``test_epoch_end``; with several loaders a list for each.

    Outputs of batches that a rank repeats are left out.
    """

    added_for = "a module with validation_epoch_end or test_epoch_end"

    def __init__(self) -> None:
        #: Of each loader; empty if the module has no method for the running stage.
        self._outputs: list[list[Any]] = []

    @hookimpl
    def on_validation_epoch_start(self, run: Run) -> None:
        method = getattr(run.module, _METHODS.get(run.stage, ""), None)
        self._outputs = [[] for _ in run.current_stage.loaders if method is not None]

    @hookimpl
    def on_validation_batch_end(self, run: Run, outputs: Any, dataloader_idx: int) -> None:
        if self._outputs and not run.repeating:
            self._outputs[dataloader_idx].append(outputs)

    @hookimpl
    def on_validation_epoch_end(self, run: Run) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            end = getattr(run.module, _METHODS[run.stage])
            end(outputs[0] if len(outputs) == 1 else outputs)
