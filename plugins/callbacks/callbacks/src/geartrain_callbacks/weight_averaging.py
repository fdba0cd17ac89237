"""PyTorch Lightning's classes of averaged weights, with a rule for when to average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from geartrain import Run, TrainingError, UsageError, hookimpl
from geartrain_callbacks.ema import EMA


class WeightAveraging(EMA):
    """Average the weights; override ``should_update`` to choose the steps or epochs.

    The first update copies the weights. By default each update counts alike. The module holds the
    average in validation and after ``fit``, and checkpoints have both, as with :class:`EMA`. Until
    the first update the module is validated and saved as it is.

    Args:
        device: where the average is kept; default: the device of the weights.
        use_buffers: average floating-point buffers too; ``False``: they are the module's.
        avg_fn: ``avg_fn(average, weight, number_of_updates)`` returns the new average of one
            tensor.
        multi_avg_fn: ``multi_avg_fn(averages, weights, number_of_updates)`` changes all averages in
            place. See ``torch.optim.swa_utils.AveragedModel`` for both.

    Raises:
        UsageError: both functions are given, or the device is unknown.
        TrainingError: ranks have made different numbers of updates.
    """

    _name = "weight_averaging"

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: Callable[[Tensor, Tensor, int], Tensor] | None = None,
        multi_avg_fn: Callable[[list[Tensor], list[Tensor], int], None] | None = None,
    ) -> None:
        super().__init__()
        if avg_fn is not None and multi_avg_fn is not None:
            message = "weight_averaging: avg_fn and multi_avg_fn are both given"
            raise UsageError(f"{message}. Fix: leave one out")
        try:
            self._device = None if device is None else torch.device(device)
        except RuntimeError as error:
            message = f"weight_averaging: device={device!r} is unknown"
            raise UsageError(f"{message}. Fix: leave it out, or 'cpu'") from error
        self._use_buffers = use_buffers
        self.avg_fn, self.multi_avg_fn = avg_fn, multi_avg_fn

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average. Every rank must give the same answer.

        Args:
            step_idx: the number of the step that is done, from 0; ``None`` after an epoch.
            epoch_idx: the number of the epoch that is done, from 0; ``None`` after a step.
        """
        return step_idx is not None

    def _after_step(self, step: int) -> None:
        if self.should_update(step_idx=step - 1):
            self._update()

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        if self.should_update(epoch_idx=run.epoch):
            self._update()

    @torch.no_grad()
    def _update(self) -> None:
        pairs = list(zip(self._average, self._weights, strict=True))
        current = [weight.to(average.device, average.dtype) for average, weight in pairs]
        if not self.updates:
            torch._foreach_copy_(self._average, current)
        else:
            self._merge(current)
        self.updates += 1

    def _merge(self, current: list[Tensor]) -> None:
        """Change the average by the weights, after the first update."""
        if self.multi_avg_fn is not None:
            self.multi_avg_fn(self._average, current, self.updates)
        elif self.avg_fn is not None:
            for average, weight in zip(self._average, current, strict=True):
                average.copy_(self.avg_fn(average, weight, self.updates))
        else:
            torch._foreach_lerp_(self._average, current, 1 / (self.updates + 1))

    @hookimpl(specname="on_validation_start")
    def _on_validation_start(self, run: Run) -> None:
        if run.command == "fit" and run.stage == "validate":
            self._check_ranks(run)
        super()._on_validation_start(run)

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        if run.command == "fit":
            self._check_ranks(run)
        super().on_run_end(run)

    def _check_ranks(self, run: Run) -> None:
        """Refuse ranks that would average, and broadcast buffers, without the others."""
        if run.world.size == 1:
            return
        local = torch.tensor([self.updates], dtype=torch.float64)
        counts = [int(n) for n in run.hooks.log_sync(run=run, values=local)[:, 0]]
        if len(set(counts)) > 1:
            raise TrainingError(
                f"geartrain-callbacks[{self._name}]: the ranks have made {counts} updates, rank by "
                "rank. Fix: let should_update return the same on every rank"
            )


class EMAWeightAveraging(WeightAveraging):
    """Average the weights exponentially, with PyTorch Lightning's options.

    Args:
        device: as for :class:`WeightAveraging`.
        use_buffers: as for :class:`WeightAveraging`.
        decay: the share of the average that an update keeps, between 0 and 1.
        update_every_n_steps: update after the steps whose number, from 0, is a multiple of this.
        update_starting_at_step: the first step, from 0, after which to update; default: 0.
        update_starting_at_epoch: update at the end of each epoch from this one, counted from 0,
            as well.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise UsageError(f"weight_averaging: decay={decay!r} must lie between 0.0 and 1.0.")
        for name, value, least in (
            ("update_every_n_steps", update_every_n_steps, 1),
            ("update_starting_at_step", update_starting_at_step, 0),
            ("update_starting_at_epoch", update_starting_at_epoch, 0),
        ):
            given: Any = least if value is None and least == 0 else value
            if isinstance(given, bool) or not isinstance(given, int) or given < least:
                raise UsageError(
                    f"weight_averaging: {name}={value!r} must be a whole number, at least {least}."
                )
        super().__init__(device, use_buffers)
        self.decay = float(decay)
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether the options choose this step or epoch."""
        if step_idx is not None:
            is_due = step_idx % self.update_every_n_steps == 0
            return is_due and step_idx >= (self.update_starting_at_step or 0)
        start = self.update_starting_at_epoch
        return epoch_idx is not None and start is not None and epoch_idx >= start

    def _merge(self, current: list[Tensor]) -> None:
        torch._foreach_lerp_(self._average, current, 1.0 - self.decay)
