"""Names that MLflow takes."""

from __future__ import annotations

import re

#: MLflow's own bound, mlflow.utils.validation.MAX_ENTITY_KEY_LENGTH.
LONGEST = 250
#: What MLflow refuses in a name, mlflow.utils.validation.validate_param_and_metric_name; colons too, which a server on Windows refuses.
_REFUSED = re.compile(r"[^/\w.\- ]")


class Names:
    """Return each name's spelling in MLflow: letters, digits, ``_ - . /`` and spaces stay, anything else becomes ``_``.

    Two names with one spelling get ``_2``, ``_3`` at the end, in the order in which they first came.
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
        # MLflow refuses what would be another path in its folders: a//b, ./a, ../a, /a.
        parts = [part for part in _REFUSED.sub("_", name).split("/") if part not in ("", ".", "..")]
        plain = "/".join(parts)[:LONGEST].rstrip("/") or "_"
        known, number = plain, 2
        while known in self._taken:
            known = f"{plain[: LONGEST - 6]}_{number}"
            number += 1
        return known
