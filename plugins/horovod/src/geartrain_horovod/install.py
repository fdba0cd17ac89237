"""Whether Horovod is installed, and how to install it."""

from __future__ import annotations

from importlib.util import find_spec


def missing() -> str | None:
    """Why Horovod cannot be used here, with how to install it; ``None`` where it can."""
    if find_spec("horovod") is None:
        return "Horovod is not installed. Fix: see the README of geartrain-horovod for how to build it"
    return None
