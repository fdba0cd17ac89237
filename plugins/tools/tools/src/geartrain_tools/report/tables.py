"""Tables of the page: runs, plans and their differences, and profile.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from geartrain_tools.report.run_files import RunFiles

#: status in summary.json -> symbol and words. Symbols, because colours alone are not enough.
_STATES = {
    "done": ("✓", "done"),
    "failed": ("✕", "failed"),
    "interrupted": ("■", "interrupted"),
    "": ("…", "no end recorded: in progress, or killed"),
}
#: Rows of profile.json's hooks.
_HOOKS = 15


def number(value: Any) -> str:
    """Return a number with at most four significant digits; other values as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def head(index: int, run: RunFiles) -> dict[str, Any]:
    """Return a run's line in the first table, and its failures and warnings."""
    summary, plan = run.summary, run.plan
    status = summary.get("status")
    symbol, words = _STATES[status if isinstance(status, str) and status in _STATES else ""]
    seconds, steps = summary.get("seconds"), summary.get("steps")
    if not _is_number(steps):
        last = [curve.steps[-1] for curve in run.metrics.curves.values() if curve.steps]
        steps = max(last) if last else None
    parts = [_name(plan, key) for key in ("strategy", "accelerator", "precision")]
    processes = plan.get("processes")
    error = str(summary.get("error", "")).removesuffix(": ")  # as of KeyboardInterrupt
    plan_notes = _items(plan.get("notes"))
    return {
        "index": index,
        "told": bool(error or run.logs or run.warnings or plan_notes or run.notes),
        "name": run.name,
        "folder": str(run.folder),
        "status": words.partition(":")[0].replace(" ", "-"),
        "symbol": symbol,
        "words": words,
        "command": str(summary.get("command", "")),
        "steps": steps,
        "epochs": summary.get("epochs"),
        "duration": _duration(seconds) if _is_number(seconds) else None,
        "ms": seconds * 1000 / steps
        if _is_number(seconds) and _is_number(steps) and steps
        else None,
        "parameters": _parameters(run.start),
        "started": str(run.start.get("started") or ""),
        "start": _start_of(run),
        "setup": " · ".join(part for part in parts if part),
        "processes": processes,
        "error": error,
        "logs": run.logs,
        "warnings": run.warnings.most_common(30),
        "more_warnings": max(len(run.warnings) - 30, 0),
        "notes": run.notes,
        "plan_notes": plan_notes,
    }


def _parameters(start: Mapping[str, Any]) -> str:
    count, trainable = start.get("parameters"), start.get("trainable_parameters")
    if not _is_number(count):
        return ""
    more = f" ({number(trainable)} trainable)" if _is_number(trainable) else ""
    return number(count) + (more if trainable != count else "")


def _start_of(run: RunFiles) -> list[tuple[str, str]]:
    """Return how a run was started: command, folder, commit, date, host."""
    start = run.start
    commit = str(start.get("commit") or "")
    if commit and start.get("uncommitted_changes"):
        commit += ", with uncommitted changes"
    started = str(start.get("started") or "")
    if run.starts > 1:
        started += f" (start {run.starts}: the run was resumed)"
    facts = {
        "command": start.get("command"),
        "directory": start.get("directory"),
        "commit": commit,
        "started": started,
        "host": start.get("host"),
        "parameters": _parameters(start),
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _name(plan: Mapping[str, Any], key: str) -> str:
    part = plan.get(key)
    return str(part.get("name", "")) if isinstance(part, dict) else ""


def _items(found: Any) -> list[tuple[str, str]]:
    return [(str(k), str(v)) for k, v in found.items()] if isinstance(found, dict) else []


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours:
        return f"{hours} h {minutes % 60:02} min"
    return f"{minutes} min {int(seconds % 60):02} s" if minutes else f"{seconds:.1f} s"


# --- plans ----------------------------------------------------------------------------------------


def plan_of(run: RunFiles) -> dict[str, Any]:
    """Return the tables of a run's plan.

    Returns:
        ``choices``: what, value, distribution, reason. ``options``: name and value, first those of
        the module and the data. ``passed_over``: plugins that were not selected, and why.
    """
    plan, choices = run.plan, []
    for key in ("accelerator", "strategy", "precision"):
        if isinstance(plan.get(key), dict):
            choices.append(_choice(key, plan[key]))
    plugins = plan.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else ():
        if isinstance(plugin, dict):
            choices.append(_choice("plugin", plugin))
    return {
        "name": run.name,
        "choices": choices,
        "options": [(name, value) for name, value in _facts(plan).items() if name not in _CHOICES],
        "passed_over": _items(plan.get("passed_over")),
    }


#: Facts that the table of choices shows with their reasons.
_CHOICES = ("accelerator", "strategy", "precision", "plugins")


def _choice(what: str, part: Mapping[str, Any]) -> tuple[str, str, str, str]:
    distribution = f"{part.get('distribution') or ''} {part.get('version') or ''}".strip()
    return what, str(part.get("name", "")), distribution, str(part.get("reason", ""))


def differences(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the facts in which the plans of runs differ, with the value of each run.

    A run without the fact has ``"–"``; so has each run without a plan.
    """
    facts = [_facts(run.plan) for run in runs]
    names = dict.fromkeys(name for fact in facts for name in fact)
    rows = [(name, [fact.get(name, "–") for fact in facts]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _facts(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a plan by name, without its reasons."""
    facts: dict[str, str] = {}
    for name, value in _items_of(plan, "hyperparameters"):
        facts[name if name.startswith("data.") else f"model.{name}"] = _text(value)
    for key in ("strategy", "accelerator", "devices", "processes", "nodes", "precision"):
        if key in plan:
            value = plan[key]
            facts[key] = _label(value) if isinstance(value, dict) else _text(value)
    for name, value in _items_of(plan, "batch_size"):
        facts[f"batch size, {name.replace('_', ' ')}"] = _text(value)
    plugins = plan.get("plugins")
    if isinstance(plugins, list):
        labels = sorted(_label(plugin) for plugin in plugins if isinstance(plugin, dict))
        facts["plugins"] = ", ".join(labels)
    facts |= {name: _text(value) for name, value in _items_of(plan, "options")}
    return facts


def _items_of(plan: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    part = plan.get(key)
    return [(str(name), value) for name, value in part.items()] if isinstance(part, dict) else []


def _label(part: Mapping[str, Any]) -> str:
    return f"{part.get('name')} {part.get('version') or ''}".strip()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- profile.json ---------------------------------------------------------------------------------


def profile(runs: Sequence[RunFiles]) -> dict[str, Any] | None:
    """Return the tables of the runs' profiles; ``None`` if no run has one.

    Returns:
        ``parts`` and ``hooks``: lists of a name and one cell for each of ``runs``, which is
        ``None`` or has ``ms`` and ``share`` (of 1). ``more`` hooks are left out.
    """
    profiled = [run for run in runs if run.profile]
    if not profiled:
        return None
    parts: dict[str, list[Any]] = {}
    hooks: dict[str, list[Any]] = {}
    for i, run in enumerate(profiled):
        for part in _rows(run.profile, "parts"):
            row = parts.setdefault(str(part.get("name")), [None] * len(profiled))
            row[i] = {"ms": part.get("ms_per_step"), "share": part.get("share")}
        for hook in _rows(run.profile, "hooks"):
            name = f"{hook.get('plugin')} {hook.get('hook')}"
            row = hooks.setdefault(name, [None] * len(profiled))
            row[i] = {"ms": hook.get("ms_per_step"), "calls": hook.get("calls")}
    return {
        "runs": [(run.name, run.profile.get("steps")) for run in profiled],
        "parts": list(parts.items()),
        "hooks": list(hooks.items())[:_HOOKS],
        "more": max(len(hooks) - _HOOKS, 0),
    }


def _rows(found: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    rows = found.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
