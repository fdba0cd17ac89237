"""``geartrain compare RUN_A RUN_B``: the first step, and the tensor, in which two runs part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geartrain import UsageError
from geartrain_cli.tables import Group
from geartrain_tools.checkpoints.compare import compared
from geartrain_tools.checkpoints.contents import files_in, progress_in, read
from geartrain_tools.checkpoints.text import table
from geartrain_tools.report.run_files import MARKS, read_run
from geartrain_tools.report.tables import differences
from geartrain_tools.verify.runs import metrics_by_step, unequal

#: Names of tensors that are shown; ``--json`` has all.
_NAMES = 5


def is_run(folder: Path) -> bool:
    """True for the folder of a run."""
    return any((folder / name).exists() for name in MARKS)


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Return where two runs part.

    Returns:
        ``settings``: name and both values; ``metrics``: the first step with other values, and their
        names and values; ``checkpoint``: the first step with other tensors of which both runs have
        a file, with the tensors; ``equal_steps`` of metrics and checkpoints. What does not differ
        is ``None``.

    Raises:
        UsageError: the runs have no step in common, in metrics.jsonl or in checkpoints.
    """
    settings = differences([read_run(folder, folder.name) for folder in (first, second)])
    lines = [metrics_by_step(folder) for folder in (first, second)]
    logged = [step for step in lines[0] if step in lines[1]]
    files = [_by_step(folder) for folder in (first, second)]
    saved = sorted(files[0].keys() & files[1].keys())
    if not logged and not saved:
        message = f"{first} and {second} have no step in common"
        raise UsageError(f"{message}. Fix: --log-every-n-steps 1 in both, or save in equal steps")
    facts: dict[str, Any] = {
        "settings": [{"name": name, "a": a, "b": b} for name, (a, b) in settings],
        "metrics": None,
        "checkpoint": None,
    }
    facts["equal_steps"] = {"metrics": len(logged), "checkpoints": len(saved)}
    for number, step in enumerate(sorted(logged)):
        pair = [steps[step] for steps in lines]
        if names := [name.removeprefix("metrics.") for name in unequal(*pair)]:
            values = [
                {name: row[name] for row in rows for name in names if name in row} for rows in pair
            ]
            facts["metrics"] = {"step": step, "names": names, "a": values[0], "b": values[1]}
            facts["equal_steps"]["metrics"] = number
            break
    for number, step in enumerate(saved):
        tensors = compared(*(read(paths[step]) for paths in files))["tensors"]
        if tensors:
            facts["checkpoint"] = {"step": step, "tensors": tensors}
            facts["equal_steps"]["checkpoints"] = number
            break
    return facts


def _by_step(folder: Path) -> dict[int, Path]:
    """Return a checkpoint of each step."""
    found: dict[int, Path] = {}
    for path in files_in(folder):
        if (progress := progress_in(path)) is not None:
            found.setdefault(progress.step, path)
    return found


def verdict(facts: Mapping[str, Any]) -> str:
    """Return the line above the tables."""
    metrics, checkpoint, equal = facts["metrics"], facts["checkpoint"], facts["equal_steps"]
    if metrics is None and checkpoint is None:
        return (
            f"no difference: {equal['metrics']} logged steps and {equal['checkpoints']} "
            "checkpoints of both runs are equal"
        )
    parts = []
    if metrics is not None:
        parts.append(f"the logged values part in step {metrics['step']}")
    if checkpoint is not None:
        largest = checkpoint["tensors"][0]["name"]
        parts.append(f"the checkpoints of step {checkpoint['step']} differ, most in {largest}")
    return f"{'; '.join(parts)}"


def tables(facts: Mapping[str, Any]) -> list[Group]:
    """Return the tables of what differs."""
    metrics, checkpoint = facts["metrics"], facts["checkpoint"]
    groups = []
    if metrics is not None:
        rows = [(n, metrics["a"].get(n, "-"), metrics["b"].get(n, "-")) for n in metrics["names"]]
        groups.append(table(f"logged in step {metrics['step']}", rows, ("A", "B")))
    if checkpoint is not None:
        tensors = checkpoint["tensors"]
        lines = [(row["name"], row["change"], row["max_abs_diff"]) for row in tensors[:_NAMES]]
        if len(tensors) > _NAMES:
            lines.append((f"and {len(tensors) - _NAMES} more, which --json lists", "", ""))
        columns = ("change", "largest difference")
        groups.append(table(f"checkpoint of step {checkpoint['step']}", lines, columns))
    settings = [(row["name"], row["a"], row["b"]) for row in facts["settings"]]
    return [*groups, table("settings", settings, ("A", "B"))]
