"""The property ``experiment`` of loggers."""

from __future__ import annotations

from typing import Any

from geartrain.errors import TrainingError


class _NoExperiment:
    """Every attribute of it can be called, with any arguments, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # so that copy, pickle and the like do not take it for data
            raise AttributeError(name)
        return lambda *_, **__: self


def experiment(instance: Any, running: bool, label: str) -> Any:
    """Return a logger's own object for its property ``experiment``.

    Args:
        instance: ``None`` if the logger writes nothing, as on all ranks but 0.
        running: True from the logger's ``on_run_start`` to the end of the run.
        label: ``DISTRIBUTION[name]`` of the logger.

    Returns:
        ``instance``; instead of ``None`` an object whose methods do nothing.

    Raises:
        TrainingError: no run is under way.
    """
    if instance is None and not running:
        message = f"{label}: its experiment exists only in a run"
        raise TrainingError(f"{message}. Fix: use it from on_fit_start on, until on_fit_end")
    return _NoExperiment() if instance is None else instance
