"""Which plugin brings a hook that is not core's: for the error about an implementation whose bringer is not selected."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from importlib_metadata import EntryPoint, entry_points

from geartrain.errors.known import HOOKS, KNOWN
from geartrain.hooks.plugin_info import GROUPS


def find_bringer(hook: str) -> str:
    """Return the plugin that brings a hook and the option that selects it; empty if neither a known nor an installed one does.

    Call it only while an error is being raised. It reads the source of installed plugins and imports none of them.
    """
    if hook in HOOKS:
        kind, name = HOOKS[hook]
        return f"{KNOWN[kind, name]}[{name}] (--{kind} {name})"
    for kind in ("strategy", "accelerator", "plugin"):
        for entry_point in entry_points(group=GROUPS[kind]):
            if _declares(entry_point, hook):
                distribution = entry_point.dist.name if entry_point.dist else "?"
                return f"{distribution}[{entry_point.name}] (--{kind} {entry_point.name})"
    return ""


def _declares(entry_point: EntryPoint, hook: str) -> bool:
    """True if a file of the entry point's package has a function of that name that is marked as a hookspec."""
    try:
        found = find_spec(
            entry_point.module.partition(".")[0]
        )  # of a whole package, so that nothing is imported
        if found is None or entry_point.module.startswith("geartrain."):
            return False
        folders = [Path(folder) for folder in found.submodule_search_locations or ()]
        files = [file for folder in folders for file in folder.rglob("*.py")] or [
            Path(str(found.origin))
        ]
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    except (
        AttributeError,
        ImportError,
        OSError,
        ValueError,
    ):  # a malformed entry point, or a package without source
        return False
    declaration = re.compile(rf"^@(?!hookimpl)\w.*\n(@.*\n)*def {re.escape(hook)}\(", re.MULTILINE)
    return any("hookspec" in text and declaration.search(text) for text in texts)
