"""Helpers of callbacks that watch a metric: when to check it, and the error if it is missing."""

from __future__ import annotations

import re

from geartrain import Run, UsageError
from geartrain.plugin_api import nearest, warn

#: Words in the names of metrics that are better the larger they are.
_LARGER_IS_BETTER = {"acc", "accuracy", "f1", "iou", "miou", "auc", "auroc", "map", "dice"}
_LARGER_IS_BETTER |= {"precision", "recall", "bleu", "rouge", "psnr", "ssim"}


def check_mode(name: str, mode: str, monitor: str | None) -> None:
    """Check the ``mode`` of a callback.

    Raises:
        UsageError: ``mode`` is neither ``"min"`` nor ``"max"``.
    """
    if mode not in ("min", "max"):
        raise UsageError(f"{name}: mode={mode!r}. Fix: 'min' or 'max'")
    words = set(re.split("[^a-z0-9]+", (monitor or "").lower()))
    if mode == "min" and words & _LARGER_IS_BETTER:
        warn(f"geartrain-callbacks[{name}] looks for the smallest {monitor}. Fix: mode='max'")


def is_better(mode: str, a: float, b: float) -> bool:
    """True if ``a`` is strictly better than ``b``; always False for NaN."""
    return a < b if mode == "min" else a > b


def looks_after_epochs(run: Run, asked: bool | None, name: str, option: str) -> bool:
    """True to check after each epoch; False to check after each validation.

    Args:
        asked: the user's choice. ``None``: after each epoch if validation is off or runs at each
            epoch's end.
        name: the callback's name.
        option: the argument that holds the user's choice.

    Raises:
        UsageError: the user chose validation, and the run has none.
    """
    options, validates = run.plan.options, bool(run.stages["validate"].loaders)
    if asked is False and not validates:
        raise UsageError(
            f"geartrain-callbacks[{name}] is to check after each validation, and the run has none. "
            f"Fix: give a validation loader, or leave {option} out"
        )
    interval = options.val_check_interval
    each_epoch = (
        isinstance(interval, float) and interval == 1.0 and options.check_val_every_n_epoch == 1
    )
    return not validates or each_epoch if asked is None else asked


def not_logged(name: str, monitor: str, known: list[str]) -> str:
    """Return sentences about a missing metric: the nearest name, and all logged names."""
    hint = nearest(monitor, known)
    # Other hints list the logged metrics, which the last sentence does.
    near = f" {hint}" if hint.startswith("Did") else ""
    return (
        f"geartrain-callbacks[{name}] monitors {monitor!r}, which was not logged.{near} "
        f"Logged: {', '.join(known) or 'nothing'}."
    )
