"""The report: parts of a step, hooks, the table and the fields of profile.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geartrain_monitor.profile.clock import Reading

REST = "rest of the loop"
#: The parts of a step, in the order of the table.
PARTS = (
    *("data", "forward", "backward", "reduction", "clipping", "optimizer", "logging"),
    *("checkpoints", "callbacks", REST),
)
#: The name of the time in a loader's ``collate_fn``, which is no hook.
COLLATE = "collate_fn"
#: hook -> its part. Other events are callbacks; other hooks belong to the rest of the loop.
_PART_OF = {
    "batches": "data",
    COLLATE: "data",
    "device_batches": "data",
    "forward": "forward",
    "backward": "backward",
    "reduce_gradients": "reduction",
    "reduce_bucket": "reduction",
    "clip_gradients": "clipping",
    "optimizer_step": "optimizer",
    "log_metrics": "logging",
    "log_sync": "logging",
    "flush": "logging",
    "save_checkpoint": "checkpoints",
    "on_checkpoint_saved": "checkpoints",
}
#: Rows of the table for hooks; profile.json has all.
_ROWS = 12


@dataclass(frozen=True, slots=True)
class Report:
    """The measured time of one rank."""

    #: ``"step"``, or ``"batch"`` of an evaluation.
    unit: str
    #: Units that were measured.
    count: int
    #: Milliseconds a unit of each of ``PARTS``.
    parts: dict[str, float]
    #: The fields ``hooks`` of profile.json, the slowest first.
    hooks: list[dict[str, Any]]

    @property
    def total(self) -> float:
        """Milliseconds a unit."""
        return sum(self.parts.values())


def make_report(
    unit: str, count: int, reading: Reading, slots: Sequence[tuple[str, str]]
) -> Report:
    """Return the report of one rank from its clock's reading of ``count`` units."""
    scale = 1000 / max(count, 1)
    parts, hooks = dict.fromkeys(PARTS, 0.0), []
    for (label, hook), seconds, calls in zip(slots, reading.seconds, reading.calls, strict=True):
        part = _PART_OF.get(hook, "callbacks" if hook.startswith("on_") else REST)
        if part == "callbacks" and label.endswith("checkpoint]"):  # it collects what it writes
            part = "checkpoints"
        parts[part] += seconds * scale
        if calls and label:
            each = {"plugin": label, "hook": hook, "part": part}
            hooks.append({**each, "ms_per_step": seconds * scale, "calls": calls})
    parts[REST] += (reading.wall - sum(reading.seconds)) * scale
    return Report(unit, count, parts, sorted(hooks, key=lambda hook: -hook["ms_per_step"]))


def slowest(name: str, ranks: Sequence[Mapping[str, float]]) -> int:
    """Return the rank that takes longest in a part."""
    return max(range(len(ranks)), key=lambda rank: ranks[rank][name])


def as_dict(
    report: Report,
    ranks: Sequence[Mapping[str, float]],
    validations: int,
    validation_ms: float,
    verdict: Sequence[str],
) -> dict[str, Any]:
    """Return the fields of profile.json. Times are CPU times of each process, in milliseconds."""
    total = report.total or 1.0
    return {
        "unit": report.unit,
        "steps": report.count,
        "ms_per_step": report.total,
        "parts": [
            {"name": name, "ms_per_step": ms, "share": ms / total}
            for name, ms in report.parts.items()
        ],
        "hooks": report.hooks,
        "ranks": [
            {"rank": rank, "ms_per_step": sum(parts.values()), "parts": dict(parts)}
            for rank, parts in enumerate(ranks)
        ],
        "validation": {"runs": validations, "ms_per_run": validation_ms},
        "verdict": list(verdict),
    }


def table(
    report: Report,
    ranks: Sequence[Mapping[str, float]],
    validations: int,
    validation_ms: float,
    verdict: Sequence[str],
) -> str:
    """Return the table of rank 0's times, and with several ranks the slowest of each part."""
    of = f" of rank 0 of {len(ranks)}" if len(ranks) > 1 else ""
    units = "batches" if report.unit == "batch" else "steps"
    lines = [f"profile: {report.count} {units}{of}, {report.total:.3f} ms each"]
    if report.unit == "step":
        lines[0] += ", without validation"
    total = report.total or 1.0
    for name, ms in report.parts.items():
        line = f"  {name:18}{ms:10.3f} ms {ms / total:6.1%}"
        if len(ranks) > 1 and any(parts[name] for parts in ranks):
            rank = slowest(name, ranks)
            line += f"   slowest: rank {rank}, {ranks[rank][name]:.3f} ms"
        lines.append(line)
    if validations:
        lines.append(f"  {'validation':18}{validation_ms:10.3f} ms each, {validations} times")
    of_plugins = [hook for hook in report.hooks if not hook["plugin"].startswith("geartrain[")]
    if of_plugins:
        lines.append(f"time in plugins, ms per {report.unit}:")
    for hook in of_plugins[:_ROWS]:
        message = f"{hook['plugin']} {hook['hook']}"
        lines.append(f"  {hook['ms_per_step']:10.4f}  {message}, {hook['calls']} calls")
    if len(of_plugins) > _ROWS:
        lines.append(
            f"  and {len(of_plugins) - _ROWS} more, in profile.json if the run has a folder"
        )
    return "\n".join([*lines, *verdict])
