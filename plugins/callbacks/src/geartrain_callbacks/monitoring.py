"""Common to callbacks that watch one metric: whose value counts, when to look, and the message if it is missing."""

from __future__ import annotations

from geartrain import Run, UsageError
from geartrain.plugin_api import nearest


def check_mode(name: str, mode: str) -> None:
    """Refuse a mode that is none.

    Raises:
        UsageError: ``mode`` is neither ``"min"`` nor ``"max"``.
    """
    if mode not in ("min", "max"):
        raise UsageError(f"{name}: mode={mode!r}. Fix: 'min' or 'max'")


def is_better(mode: str, a: float, b: float) -> bool:
    """True if ``a`` is strictly better than ``b``; NaN never is."""
    return a < b if mode == "min" else a > b


def looks_after_epochs(run: Run, asked: bool | None, name: str, option: str) -> bool:
    """True to look after each epoch; otherwise after each validation.

    Args:
        asked: the user's choice; ``None``: after each epoch, if validation is off or belongs to each epoch's end.
        name: the callback's.
        option: the argument by which the user said it.

    Raises:
        UsageError: after each validation, and there is none.
    """
    options, validates = run.plan.options, bool(run.stages["validate"].loaders)
    if asked is False and not validates:
        raise UsageError(
            f"geartrain-callbacks[{name}] is to look after each validation, and there is none. "
            f"Fix: give a validation loader, or leave {option} out"
        )
    interval = options.val_check_interval
    each_epoch = (
        isinstance(interval, float) and interval == 1.0 and options.check_val_every_n_epoch == 1
    )
    return not validates or each_epoch if asked is None else asked


def not_logged(name: str, monitor: str, known: list[str]) -> str:
    """Return sentences about a missing metric: the nearest name, and all names."""
    hint = nearest(monitor, known)
    near = (
        f" {hint}" if hint.startswith("Did") else ""
    )  # otherwise it lists the logged metrics, as this does
    return f"geartrain-callbacks[{name}] monitors {monitor!r}, which was not logged.{near} Logged: {', '.join(known) or 'nothing'}."
