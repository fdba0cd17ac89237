"""Check the options of ``model_checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geartrain import UsageError


def check_options(
    *,
    monitor: str | None,
    save_top_k: Any,
    save_last: Any,
    save_on_exception: bool,
    by_epochs: Mapping[str, Any],
    by_steps: Mapping[str, Any],
) -> None:
    """Refuse options that contradict each other.

    Args:
        monitor: the metric.
        save_top_k: as the option.
        save_last: as the option.
        save_on_exception: as the option.
        by_epochs: the options that check by epochs.
        by_steps: those that check within an epoch.

    Raises:
        UsageError: they do.
    """
    if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
        raise UsageError(
            f"model_checkpoint: save_top_k={save_top_k!r} must be a whole number, at least -1."
        )
    if monitor is None and save_top_k > 1:
        raise UsageError(
            f"model_checkpoint: save_top_k={save_top_k} needs a metric. "
            "Fix: monitor='val_loss', or monitor='step' and mode='max' to keep the newest"
        )
    if save_last not in (True, False, "link"):
        raise UsageError(f"model_checkpoint: save_last={save_last!r}. Fix: True or 'link'")
    if save_top_k == 0 and not save_last and not save_on_exception:
        raise UsageError(
            "model_checkpoint: save_top_k=0 without save_last saves nothing. "
            "Fix: leave the plugin out, or save_last=True"
        )
    for name in ("every_n_epochs", "every_n_train_steps"):
        value = {**by_epochs, **by_steps}[name]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise UsageError(
                f"model_checkpoint: {name}={value!r} must be a whole number, at least 1."
            )
    given = {name for name, value in by_steps.items() if value is not None}
    if given and any(value is not None for value in by_epochs.values()):
        raise UsageError(
            f"model_checkpoint: {' and '.join(sorted(given))} checks by steps, every_n_epochs and "
            "save_on_train_epoch_end by epochs. "
            "Fix: leave one out, or two of them with a filename each"
        )
    if len(given) > 1:
        raise UsageError(
            "model_checkpoint: every_n_train_steps and train_time_interval are given. "
            "Fix: leave one out, or two of them with a filename each"
        )
