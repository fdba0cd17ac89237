"""``swa``: stochastic weight averaging."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from geartrain import Plan, Run, UsageError, hookimpl
from geartrain.plugin_api import close_batches, warn
from geartrain_callbacks.ema import EMA
from geartrain_callbacks.finetuning import BaseFinetuning


class StochasticWeightAveraging(EMA):
    """Average the weights at the ends of the last epochs; train those with their own rate.

    From the first of these epochs the learning rate of each group goes from its value to
    ``swa_lrs`` in ``annealing_epochs`` epochs and stays there; it is set after each step, so
    schedulers of the module change nothing any more. At the end of ``fit`` the module holds the
    average, and one more pass over the training data computes BatchNorm's statistics for it.
    Validation uses the trained weights. A checkpoint has the average beside the trained weights, as
    ``average``. A ``fit`` that fails leaves the trained weights in the module.

    Args:
        swa_lrs: the rate of the averaged epochs; a list has one for each group of the optimizer.
        swa_epoch_start: the first epoch to average, counted from 1, or a fraction of
            ``max_epochs``.
        annealing_epochs: epochs from the old rate to ``swa_lrs``.
        annealing_strategy: ``"cos"`` or ``"linear"``.

    Raises:
        UsageError: an argument is out of range; the module optimizes manually or has several
            optimizers; a fraction is given without ``max_epochs``; or a list beside a callback that
            adds groups.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization",
    2018, with the recipe of ``torch.optim.swa_utils``; options of PyTorch Lightning.
    """

    _name = "swa"

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
    ) -> None:
        super().__init__(validate=False)
        lrs = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not lrs or not all(type(lr) in (int, float) and lr > 0 for lr in lrs):
            raise UsageError(f"swa: swa_lrs={swa_lrs!r} must be a number above 0, or a list.")
        fraction = isinstance(swa_epoch_start, float) and 0.0 <= swa_epoch_start <= 1.0
        if not fraction and (type(swa_epoch_start) is not int or swa_epoch_start < 1):
            message = f"swa: swa_epoch_start={swa_epoch_start!r}"
            raise UsageError(f"{message}. Fix: an epoch, at least 1, or a fraction up to 1.0")
        if type(annealing_epochs) is not int or annealing_epochs < 0:
            raise UsageError(f"swa: annealing_epochs={annealing_epochs!r} must be at least 0.")
        if annealing_strategy not in ("cos", "linear"):
            message = f"swa: annealing_strategy={annealing_strategy!r}"
            raise UsageError(f"{message}. Fix: 'cos' or 'linear'")
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy = annealing_epochs, annealing_strategy
        self._start = 0

    def forget(self) -> None:
        super().forget()
        #: The rate of each group when averaging began; empty before.
        self._old_lrs: list[float] = []

    @hookimpl
    def check_plan(self, plan: Plan, module: Any) -> None:
        if getattr(module, "automatic_optimization", True) is False:
            message = (
                "geartrain-callbacks[swa] sets learning rates, and the module optimizes manually"
            )
            raise UsageError(f"{message}. Fix: use torch.optim.swa_utils in training_step")
        start, epochs = self.swa_epoch_start, plan.options.max_epochs
        if isinstance(start, float):
            if epochs == -1:
                message = f"swa: swa_epoch_start={start!r} is a fraction of max_epochs"
                raise UsageError(f"{message}, which has no end. Fix: give max_epochs, or an epoch")
            start = int(epochs * start)
        self._start = max(start - 1, 0)

    @hookimpl(wrapper=True)
    def launch(self, run: Run) -> Generator[None, Any, Any]:
        for part in run.hooks.parts if isinstance(self.swa_lrs, list) else ():
            if isinstance(callback := getattr(part.plugin, "callback", None), BaseFinetuning):
                message = "geartrain-callbacks[swa]: swa_lrs has a rate for each group, and "
                message += f"{type(callback).__name__} adds groups in training"
                raise UsageError(f"{message}. Fix: one rate for all groups, as swa_lrs=0.05")
        return (yield)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        if run.command != "fit":
            return
        super().on_run_start(run)
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        if len(run.optimizers) != 1:
            message = f"geartrain-callbacks[swa]: the module has {len(run.optimizers)} optimizers"
            raise UsageError(f"{message}. Fix: return one from configure_optimizers")
        self._rates(len(groups))

    def _rates(self, groups: int) -> list[float]:
        if not isinstance(self.swa_lrs, list):
            return [self.swa_lrs] * groups
        if len(self.swa_lrs) != groups:
            message = f"geartrain-callbacks[swa]: swa_lrs has {len(self.swa_lrs)} rates"
            raise UsageError(f"{message}, and the optimizer {groups} groups. Fix: one for all")
        return self.swa_lrs

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        if run.epoch >= self._start and not self._old_lrs:
            self._old_lrs = [group["lr"] for group in run.optimizers[0].param_groups]
        if self._old_lrs:
            self._set_rates(run)

    def _step_done(self, run: Run, step: int) -> None:
        if self._old_lrs:
            self._set_rates(run)

    def _set_rates(self, run: Run) -> None:
        done = min(1.0, (run.epoch - self._start) / max(1, self.annealing_epochs))
        share = done if self.annealing_epochs else 1.0
        if self.annealing_strategy == "cos":
            share = (1 - math.cos(math.pi * share)) / 2
        groups = run.optimizers[0].param_groups
        # A group may be new: backbone_finetuning adds one.
        self._old_lrs += [group["lr"] for group in groups[len(self._old_lrs) :]]
        for group, old, new in zip(groups, self._old_lrs, self._rates(len(groups)), strict=True):
            group["lr"] = old + (new - old) * share

    @hookimpl
    @torch.no_grad()
    def on_epoch_end(self, run: Run) -> None:
        if run.epoch >= self._start:
            self.updates += 1
            current = [w.to(a.dtype) for w, a in zip(self._weights, self._average, strict=True)]
            torch._foreach_lerp_(self._average, current, 1 / self.updates)

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        super().on_run_end(run)
        if run.command != "fit":
            return
        if self.updates:
            _update_batch_norm(run)
        elif run.world.rank == 0:
            message = (
                f"geartrain-callbacks[swa] averaged nothing: epoch {self._start + 1} was not run"
            )
            warn(f"{message}. Fix: a smaller swa_epoch_start")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "old_lrs": list(self._old_lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._old_lrs = list(state["old_lrs"])


def _update_batch_norm(run: Run) -> None:
    """Compute BatchNorm's statistics of the module's weights, as ``torch.optim.swa_utils`` does."""
    norms = [
        part
        for part in run.module.modules()
        if isinstance(part, _BatchNorm) and part.track_running_stats
    ]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    stage = run.stages["train"]
    loader, limit = stage.loaders[0], stage.batches[0]
    batches = run.hooks.device_batches(run=run, loader=loader, stage="train")
    try:
        with torch.no_grad(), run.logs.scope(keep=False):
            for i, batch in enumerate(run.coordinator.batches(run, batches, limit)):
                run.batch = batch
                run.hooks.forward(run=run, method="training_step", args=(batch, i))
        with torch.no_grad():
            run.coordinator.broadcast_buffers(run)
    finally:
        run.batch = None
        close_batches(batches, loader)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
