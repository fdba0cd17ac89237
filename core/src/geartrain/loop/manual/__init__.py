"""``automatic_optimization = False``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geartrain.hooks.manager import Hooks

#: What manual optimisation is called among the parts of a run.
MANUAL = "manual_optimisation"


def is_manual(hooks: Hooks) -> bool:
    """Whether these hooks are those of manual optimisation."""
    owner = hooks.owner("step")
    return owner is not None and owner.is_core and owner.name == MANUAL
