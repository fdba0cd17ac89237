"""Metric and parameter names that MLflow accepts."""

from __future__ import annotations

import re

#: MLflow's limit, mlflow.utils.validation.MAX_ENTITY_KEY_LENGTH.
LONGEST = 250
#: Characters that mlflow.utils.validation.validate_param_and_metric_name refuses, and colons,
#: which a server on Windows refuses.
_REFUSED = re.compile(r"[^/\w.\- ]")


class Names:
    """Map each name to its spelling in MLflow.

    Letters, digits, ``_ - . /`` and spaces stay; other characters become ``_``. If two names get
    the same spelling, the later one ends in ``_2``, ``_3`` and so on.
    """

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._taken: set[str] = set()

    def __getitem__(self, name: str) -> str:
        if name not in self._found:
            self._found[name] = self._new(name)
            self._taken.add(self._found[name])
        return self._found[name]

    def _new(self, name: str) -> str:
        # MLflow refuses names that are not normalised as paths: a//b, ./a, ../a, /a.
        parts = [part for part in _REFUSED.sub("_", name).split("/") if part not in ("", ".", "..")]
        plain = "/".join(parts)[:LONGEST].rstrip("/") or "_"
        known, number = plain, 2
        while known in self._taken:
            known = f"{plain[: LONGEST - 6]}_{number}"
            number += 1
        return known
