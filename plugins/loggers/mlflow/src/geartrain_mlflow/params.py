"""A run's hyperparameters and plan, as MLflow's params."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geartrain import Plan

#: MLflow's limit, mlflow.utils.validation.MAX_PARAM_VAL_LENGTH.
LONGEST = 6000


def params(plan: Plan) -> dict[str, str]:
    """Return hyperparameters by their names, and the plan's values as ``plan.NAME``.

    Returns:
        Text by name: strings unchanged, other values as JSON; cut at MLflow's limit.
    """
    facts = plan.as_dict()
    chosen = {name: facts[name]["name"] for name in ("accelerator", "strategy", "precision")}
    found: dict[str, Any] = {
        **{name: facts[name] for name in ("devices", "processes", "nodes")},
        **{f"batch_size.{which}": size for which, size in facts["batch_size"].items()},
        "plugins": [choice["name"] for choice in facts["plugins"]],
        **facts["options"],
    }
    every = {
        **plan.hyperparameters,
        **{f"plan.{name}": value for name, value in {**chosen, **found}.items()},
    }
    return {name: _text(value)[:LONGEST] for name, value in every.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
