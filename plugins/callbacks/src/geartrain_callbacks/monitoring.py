"""What callbacks that watch one metric have in common: whose value counts, when to look, and what to say where it is not there."""

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
    """Whether ``a`` is strictly better than ``b``; NaN never is."""
    return a < b if mode == "min" else a > b


def looks_after_epochs(run: Run, asked: bool | None, name: str, option: str) -> bool:
    """Whether to look after each epoch; otherwise after each validation.

    Args:
        asked: what the user said; ``None``: after each epoch where validation, if there is one, belongs to each epoch's end.
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
    each_epoch = isinstance(interval, float) and interval == 1.0 and options.check_val_every_n_epoch == 1
    return not validates or each_epoch if asked is None else asked


def not_logged(name: str, monitor: str, known: list[str]) -> str:
    """Sentences about a metric that is not there: the nearest that is, and all that are."""
    hint = nearest(monitor, known)
    near = f" {hint}" if hint.startswith("Did") else ""  # otherwise it lists what is logged, as this does
    return f"geartrain-callbacks[{name}] monitors {monitor!r}, which was not logged.{near} Logged: {', '.join(known) or 'nothing'}."
