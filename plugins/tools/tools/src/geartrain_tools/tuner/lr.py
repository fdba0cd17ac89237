"""The learning-rate finder: train with a growing learning rate; find where the loss falls fastest.

Source: Leslie N. Smith 2015, "Cyclical Learning Rates for Training Neural Networks", section 3.3,
https://arxiv.org/abs/1506.01186; smoothing and steepest point as in fastai and PyTorch Lightning.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from geartrain import Run, TrainingError, UsageError, hookimpl
from geartrain_tools.tuner.chart import chart

#: The share of the averaged loss that each step keeps.
BETA = 0.98
#: Points to ignore: at the start the average settles, at the end the loss diverges.
SKIP_BEGIN, SKIP_END = 10, 1


@dataclass
class LRFinder:
    """The result of :meth:`geartrain.tuning.Tuner.lr_find`; equal on all ranks."""

    #: ``"exponential"`` or ``"linear"``.
    mode: str
    #: The learning rate of each step.
    lrs: list[float] = field(default_factory=list)
    #: The exponentially averaged loss of each step, mean over all ranks.
    losses: list[float] = field(default_factory=list)
    #: The loss of each step, mean over all ranks.
    raw_losses: list[float] = field(default_factory=list)
    #: Why the search ended before the last step; empty if it did not.
    stopped: str = ""

    @property
    def results(self) -> dict[str, list[float]]:
        """Return ``{"lr": lrs, "loss": losses}``."""
        return {"lr": self.lrs, "loss": self.losses}

    def suggestion(self, skip_begin: int = SKIP_BEGIN, skip_end: int = SKIP_END) -> float | None:
        """Return the learning rate at which the averaged loss falls fastest.

        It is ``None`` if :meth:`why_not` gives a reason.

        Args:
            skip_begin: steps to ignore at the beginning.
            skip_end: steps to ignore at the end.
        """
        slopes = self._slopes(skip_begin, skip_end)
        if not slopes or not self._falls(slopes):
            return None
        return self.lrs[skip_begin + slopes.index(min(slopes))]

    def why_not(self, skip_begin: int = SKIP_BEGIN, skip_end: int = SKIP_END) -> str:
        """Return why no learning rate is suggested; empty if one is."""
        slopes = self._slopes(skip_begin, skip_end)
        if not self.lrs and not self.stopped:
            return (
                "no step had a loss. Fix: return it from training_step, "
                "or in manual optimisation give it to self.manual_backward"
            )
        if not slopes:
            ended = f" ({self.stopped})" if self.stopped else ""
            return (
                f"only {len(self.lrs)} steps had a loss{ended}, "
                f"and {skip_begin + skip_end} are ignored. Fix: use a lower min_lr"
            )
        if not self._falls(slopes):
            return (
                f"the loss fell nowhere between {self.lrs[0]:.3g} and {self.lrs[-1]:.3g}. "
                "Fix: use another range, or look at the model"
            )
        return ""

    def doubt(self) -> str:
        """Return why not to trust the suggestion; empty if there is no doubt.

        Losses of single batches are noisy. If the noise is too large, the steepest fall is noise.
        Then the averaged loss also rises, at least a third as steeply, before its minimum; or its
        minimum comes first. A fall after the minimum, where training diverges, is not progress.
        """
        slopes = self._slopes(SKIP_BEGIN, SKIP_END)
        best = self.losses.index(min(self.losses)) if slopes else 0
        before = slopes[: max(0, best - SKIP_BEGIN)]
        if (
            not slopes
            or not self._falls(slopes)
            or (before and min(before) == min(slopes) and max(before) < -min(slopes) / 3)
        ):
            return ""
        if SKIP_BEGIN <= best < SKIP_BEGIN + slopes.index(min(slopes)):
            lowest = f"{self.lrs[best]:.3g}"
            return (
                f"the loss was lowest at {lowest}, and only beyond it, where training diverges, "
                f"fell faster. Fix: max_lr={lowest}"
            )
        return (
            "the loss is noisy: it rose about as steeply elsewhere. "
            "Fix: use a larger batch, more steps (num_training), or a higher min_lr"
        )

    def plot(self, suggest: bool = True, width: int = 72, height: int = 14) -> str:
        """Return a text drawing of the averaged loss over the learning rate.

        Args:
            suggest: mark the suggestion.
            width: columns of the drawing.
            height: lines of the drawing.
        """
        mark = self.suggestion() if suggest else None
        return chart(
            self.lrs,
            self.losses,
            mark,
            logarithmic=self.mode == "exponential",
            width=width,
            height=height,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "suggestion": self.suggestion(),
            "why_not": self.why_not(),
            "doubt": self.doubt(),
            **asdict(self),
        }

    def _falls(self, slopes: list[float]) -> bool:
        """True if the steepest slope falls by more than rounding errors."""
        return min(slopes) < -torch.finfo(torch.float32).eps * max(map(abs, self.losses))

    def _slopes(self, skip_begin: int, skip_end: int) -> list[float]:
        """Return the change of the averaged loss per step, from both neighbours of each point.

        Steps are equally far apart on the scale of ``mode``.
        """
        losses = self.losses[skip_begin : len(self.losses) - skip_end]
        if len(losses) < 2:
            return []
        slopes: list[float] = torch.gradient(torch.tensor(losses, dtype=torch.float64))[0].tolist()
        return slopes


def schedule(min_lr: float, max_lr: float, steps: int, mode: str) -> list[float]:
    """Return the learning rate of each step, from ``min_lr`` to ``max_lr`` inclusive.

    Raises:
        UsageError: the range, the number of steps or the mode is wrong.
    """
    if mode not in ("exponential", "linear"):
        raise UsageError(f"mode={mode!r}. Fix: 'exponential' or 'linear'")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < SKIP_BEGIN + SKIP_END + 2:
        raise UsageError(
            f"num_training={steps!r} must be a whole number, at least "
            f"{SKIP_BEGIN + SKIP_END + 2}: the first {SKIP_BEGIN} steps and the "
            "last are ignored."
        )
    if not 0 < min_lr < max_lr < math.inf:
        raise UsageError(
            f"min_lr={min_lr!r} and max_lr={max_lr!r} must be above 0, "
            "and the first below the second."
        )
    parts = [i / (steps - 1) for i in range(steps)]
    if mode == "linear":
        return [min_lr + (max_lr - min_lr) * part for part in parts]
    return [min_lr * (max_lr / min_lr) ** part for part in parts]


class LRSweep:
    """The finder's plugin: set the learning rate before each step and record the loss after it.

    The first parameter group of the first optimizer gets the learning rate; the other groups keep
    their ratio to it. Schedulers are not stepped.

    Args:
        lrs: the learning rate of each step.
        mode: how they grow.
        threshold: end if the averaged loss is above this many times its best; ``None``: never.

    Raises:
        TrainingError: there is no learning rate to set.
    """

    def __init__(self, lrs: Sequence[float], mode: str, threshold: float | None) -> None:
        self.found = LRFinder(mode)
        self._lrs, self._threshold = list(lrs), threshold
        self._ratios: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._average, self._best = 0.0, math.inf

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        bases = [_base(group) for group in _groups(run)]
        if not bases or not bases[0]:
            message = "is 0" if bases else "does not exist: configure_optimizers gave no optimizer"
            raise TrainingError(
                f"the learning rate to vary {message}. "
                "Fix: configure_optimizers with a learning rate above 0"
            )
        self._ratios = [base / bases[0] for base in bases]
        for scheduler in run.schedulers:
            scheduler.frequency = sys.maxsize  # never step this scheduler

    @hookimpl(wrapper=True)
    def backward(self, loss: torch.Tensor) -> Generator[None, Any, Any]:
        self._losses.append(loss.detach())
        return (yield)

    @hookimpl(wrapper=True)
    def step(self, run: Run, micro_batches: Sequence[Any]) -> Generator[None, None, None]:
        lr = self._lrs[run.step]
        for group, ratio in zip(_groups(run), self._ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr * ratio)
            else:
                group["lr"] = lr * ratio
        self._losses.clear()
        yield
        # An optimizer with a closure computes the loss several times; the first is the loss of the
        # weights before the step. Each loss is divided by the window's length, so their sum is the
        # mean. The CPU waits for the device here.
        if run.loop.weights:
            self._losses[:] = [run.loop.weights.loss]
        losses = [float(loss) for loss in self._losses[: len(micro_batches)]]
        if losses:
            self._record(run, lr, sum(losses))

    def _record(self, run: Run, lr: float, loss: float) -> None:
        """Record the mean over ranks, which is equal on all, so all end in the same step."""
        loss = float(
            run.hooks.log_sync(run=run, values=torch.tensor([loss], dtype=torch.float64)).mean()
        )
        found = self.found
        if not math.isfinite(loss):
            self._stop(run, f"the loss was {loss} at the learning rate {lr:.3g}")
            return
        self._average = BETA * self._average + (1 - BETA) * loss
        smooth = self._average / (1 - BETA ** (len(found.losses) + 1))
        found.lrs.append(lr)
        found.losses.append(smooth)
        found.raw_losses.append(loss)
        # The average of a few batches is unreliable: one low loss would stay the best.
        if len(found.losses) <= SKIP_BEGIN:
            return
        # This form of `smooth > threshold * best` is also right for negative losses.
        if self._threshold is not None and smooth - self._best > (self._threshold - 1) * abs(
            self._best
        ):
            self._stop(run, f"the loss diverged at the learning rate {lr:.3g}")
        self._best = min(self._best, smooth)

    def _stop(self, run: Run, why: str) -> None:
        self.found.stopped, run.should_stop = why, True

    # If the strategy trains in other processes, these methods return the curve to the caller.

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.found)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = LRFinder(**state)


def _groups(run: Run) -> list[dict[str, Any]]:
    return [group for optimizer in run.optimizers for group in optimizer.param_groups]


def _base(group: dict[str, Any]) -> float:
    """Return a group's initial learning rate; a warm-up may have changed the current one."""
    lr = group.get("initial_lr", group.get("lr"))
    if lr is None:
        raise TrainingError(
            "an optimizer's parameter group has no learning rate to vary. "
            "Fix: give it one, as lr=1e-3"
        )
    return float(lr)
