"""Find the plugin that brings a hook, for the error if that plugin is not selected."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from importlib_metadata import EntryPoint

from geartrain.errors.distributions import entry_points
from geartrain.errors.known import HOOKS, KNOWN
from geartrain.hooks.plugin_info import GROUPS


def find_bringer(hook: str) -> str:
    """Return the plugin that brings a hook and the option that selects it; empty if none does.

    Call it only to raise an error: it reads the source of installed plugins, but imports none.
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
    """True if a file of the entry point's package has a hookspec of that name."""
    try:
        found = find_spec(entry_point.module.partition(".")[0])  # of a package: imports nothing
        if found is None or entry_point.module.startswith("geartrain."):
            return False
        folders = [Path(folder) for folder in found.submodule_search_locations or ()]
        files = [file for folder in folders for file in folder.rglob("*.py")]
        files = files or [Path(str(found.origin))]
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    except (AttributeError, ImportError, OSError, ValueError):  # a malformed entry point, no source
        return False
    declaration = re.compile(rf"^@(?!hookimpl)\w.*\n(@.*\n)*def {re.escape(hook)}\(", re.MULTILINE)
    return any("hookspec" in text and declaration.search(text) for text in texts)
