"""``geartrain ckpt list`` and ``show``: what checkpoints contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from geartrain import TrainingError
from geartrain_cli.tables import Group
from geartrain_tools.checkpoints.contents import (
    FORMAT,
    Progress,
    ends_with,
    label_of,
    mapping,
    plan_of,
    progress_in,
    ranks_of,
    read,
    sequence,
    tensors_of,
    trackers_in,
)
from geartrain_tools.checkpoints.text import size, table

#: Keys of a checkpoint that are not the module's own values.
_KNOWN = {
    *("geartrain", "step", "epoch", "plan", "fit", "saved_by"),
    *("hyper_parameters", "module"),
}
#: Keys that hold weights.
_WEIGHTS = ("model", "trained", "average")


# --- list -----------------------------------------------------------------------------------------


def listed(folder: Path, files: list[Path]) -> list[dict[str, Any]]:
    """Return the facts of each checkpoint of a folder, oldest progress first."""
    rows = [_row(path, folder) for path in files]
    rows.sort(key=lambda row: (row["key"], row["date"], row["path"].name == "last.ckpt"))
    readable = [row for row in rows if row["state"] is not None]
    if readable:
        newest = readable[-1]
        newest["marks"].append("newest")
        for tracker in trackers_in(newest["state"]):
            if best := _best(tracker, rows, folder):
                best["marks"].append("best")
    for row in rows:
        del row["key"], row["state"], row["path"]
        row["marks"] = list(dict.fromkeys(row["marks"]))
    return rows


def _best(
    tracker: Mapping[str, Any], rows: list[dict[str, Any]], folder: Path
) -> dict[str, Any] | None:
    name = tracker["best_model_path"]
    found = [row for row in rows if ends_with(row["path"], name)]
    inside = [row for row in found if row["path"] == folder / "checkpoints" / str(name)]
    return next(iter(inside or found), None)


def _row(path: Path, folder: Path) -> dict[str, Any]:
    status, state, marks = path.stat(), None, []
    progress = progress_in(path)
    with suppress(TrainingError):
        state = read(path)
    if state is None:
        marks.append("cannot be read")
    elif progress is None:
        progress = _progress_of(state)
    trackers = trackers_in(state or {})
    scores = {name: s for t in trackers for name, s in mapping(t["best_k_models"]).items()}
    score = next((s for name, s in scores.items() if ends_with(path, name)), None)
    return {
        "file": label_of(path, folder),
        "step": None if progress is None else progress.step,
        "epoch": None if progress is None else progress.epoch,
        "batch": None if progress is None else progress.batch_idx,
        "score": score if isinstance(score, float | int) else None,
        "bytes": status.st_size,
        "date": _date(status.st_mtime),
        "marks": marks,
        "key": (-1, -1, -1) if progress is None else progress.key,
        "state": state,
        "path": path,
    }


def _progress_of(state: Mapping[str, Any]) -> Progress | None:
    fit = mapping(state.get("fit")) or state
    found = [fit.get(name, 0) for name in ("epoch", "step", "batch_idx")]
    return Progress(*found) if all(isinstance(number, int) for number in found) else None


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def list_table(title: str, rows: list[dict[str, Any]]) -> Group:
    """Return the table of ``geartrain ckpt list``."""
    cells = [
        (
            row["file"],
            _number(row["step"]),
            _epoch(row["epoch"], row["batch"]),
            "-" if row["score"] is None else f"{row['score']:.6g}",
            ", ".join(row["marks"]),
            size(row["bytes"]),
            row["date"],
        )
        for row in rows
    ]
    return table(title, cells, ("step", "epoch", "score", "", "size", "date"))


def _epoch(epoch: int | None, batch: int | None) -> str:
    return f"{epoch}, batch {batch}" if batch else _number(epoch)


def _number(value: Any) -> str:
    return "-" if value is None else str(value)


# --- show -----------------------------------------------------------------------------------------


def described(path: Path) -> dict[str, Any]:
    """Return all facts of one checkpoint.

    Raises:
        TrainingError: it cannot be read.
    """
    state, status = read(path), path.stat()
    fit, plan, ranks = mapping(state.get("fit")), plan_of(state), ranks_of(state)
    writer = mapping(state.get("saved_by"))
    return {
        "file": str(path),
        "bytes": status.st_size,
        "date": _date(status.st_mtime),
        "format": fit.get("format"),
        "geartrain": state.get("geartrain"),
        "saved_by": _label(writer) if writer else None,
        "module": mapping(state.get("module")).get("class"),
        "step": state.get("step"),
        "epoch": state.get("epoch"),
        "batch": fit.get("batch_idx"),
        "world_size": len(ranks) or None,
        "plan": {key: value for key, value in plan.items() if key != "passed_over"},
        "installed": {name: _installed(name) for name in sorted(_distributions(plan))},
        "sizes": {name: _size_of(value) for name, value in _parts(state)},
        "not_restored": [list(pair) for pair in _not_restored(state, plan)],
    }


def _label(part: Mapping[str, Any]) -> str:
    name, home = part.get("name"), part.get("distribution")
    return f"{home}[{name}]" if home else str(name)


def _plugins(plan: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the kind and the facts of each plugin of a plan."""
    for kind in ("accelerator", "strategy", "precision"):
        if plan.get(kind):
            yield kind, mapping(plan[kind])
    yield from (("plugin", mapping(part)) for part in sequence(plan.get("plugins")))


def _distributions(plan: Mapping[str, Any]) -> set[str]:
    return {str(p["distribution"]) for _, p in _plugins(plan) if p.get("distribution")}


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except (PackageNotFoundError, ValueError):
        return None


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the contents of each part of a checkpoint."""
    fit, ranks = mapping(state.get("fit")), ranks_of(state)
    yield from ((name, state[name]) for name in _WEIGHTS if name in state)
    for kind in ("optimizers", "schedulers"):
        for index, item in enumerate(sequence(fit.get(kind))):
            yield f"{kind}.{index} ({mapping(item).get('class')})", item
    for name, part in mapping(fit.get("parts")).items():
        yield f"state of {name}", part
    for name in dict.fromkeys(n for rank in ranks for n in mapping(rank.get("parts"))):
        held = [rank["parts"][name] for rank in ranks if name in mapping(rank.get("parts"))]
        yield f"state of {name}, {len(held)} ranks", held
    other = [{key: value for key, value in r.items() if key != "parts"} for r in ranks]
    if other:
        yield "random states and logged values", other
    for name in state:
        if name not in _KNOWN and name not in _WEIGHTS:
            yield f"{name} (of the module)", state[name]


def _size_of(part: Any) -> dict[str, int]:
    tensors = list(tensors_of(part).values())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    numbers = sum(tensor.numel() for tensor in tensors)
    return {"tensors": len(tensors), "numbers": numbers, "bytes": sum(storages.values())}


def _not_restored(state: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a ``fit`` here could not restore from a checkpoint, and why."""
    for name in sequence(mapping(state.get("module")).get("missing")):
        yield f"argument {name} of the module", "it cannot be read as data alone"
    fit = mapping(state.get("fit"))
    if not fit:
        yield "everything but the weights", "the file has no 'fit': no fit saved it"
        return
    if fit.get("format") != FORMAT:
        reason = f"it has format {fit.get('format')}, and this version reads format {FORMAT}"
        yield "everything but the weights", reason
    for name in sequence(fit.get("left_out")):
        reason = "its state_dict() had a value that cannot be read as data alone"
        yield f"state of {name}", reason
    for scheduler in sequence(fit.get("schedulers")):
        if mapping(scheduler).get("state") is None:
            reason = "it has none, or one that cannot be read as data alone"
            yield f"state of {mapping(scheduler).get('class')}", reason
    writer = mapping(state.get("saved_by"))
    for kind, part in [*_plugins(plan), *([("writer of the file", writer)] if writer else [])]:
        home = part.get("distribution")
        if home and _installed(str(home)) is None:
            yield f"{kind} {_label(part)}", f"{home} is not installed here"
    ranks = ranks_of(state)
    alone = sorted({str(name) for rank in ranks for name in mapping(rank.get("parts"))})
    if len(ranks) > 1:
        kept = f"each of {len(ranks)} ranks has its own: another number of ranks starts without"
        yield ", ".join([*(f"state of {name}" for name in alone), "random states"]), kept
    if fit.get("batch_idx"):
        reason = "the loaders must give the same batches again: an iterator does not"
        yield "the position in the epoch", reason


def show_tables(facts: Mapping[str, Any]) -> list[Group]:
    """Return the tables of ``geartrain ckpt show``."""
    plan = facts["plan"]
    batch, ranks = facts["batch"], facts["world_size"]
    position = "none: only weights" if facts["format"] is None else "between two epochs"
    if batch:
        position = f"{batch} batches of epoch {facts['epoch']} (from 0) are done"
    rows = [
        ("file", facts["file"]),
        ("size", size(facts["bytes"])),
        ("date", facts["date"]),
        ("format", _number(facts["format"])),
        ("geartrain", f"{facts['geartrain']} (here {_installed('geartrain')})"),
        ("written by", facts["saved_by"] or "geartrain"),
        ("module", _number(facts["module"])),
        ("step", _number(facts["step"])),
        ("epoch", _number(facts["epoch"])),
        ("position", position),
        ("world size", _number(ranks)),
    ]
    if plan:
        batches = mapping(plan.get("batch_size"))
        rows += [
            ("processes, nodes", f"{plan.get('processes')}, {plan.get('nodes')}"),
            ("devices of a node", ", ".join(map(str, sequence(plan.get("devices"))))),
            ("batch size", f"{batches.get('per_device')} per device, {batches.get('global')}"),
        ]
    parts = [
        (
            _label(part),
            kind,
            _number(part.get("version")),
            _here(part, facts["installed"]),
            _number(part.get("reason")),
        )
        for kind, part in _plugins(plan)
    ]
    options = {k: v for k, v in mapping(plan.get("options")).items() if v not in (None, False)}
    sizes = [
        (name, f"{each['tensors']}", f"{each['numbers']:,}", size(each["bytes"]))
        for name, each in facts["sizes"].items()
    ]
    return [
        table("checkpoint", rows),
        table("plan", parts, ("kind", "version", "here", "reason")),
        table("hyperparameters", mapping(plan.get("hyperparameters")).items()),
        table("options", options.items()),
        table("sizes", sizes, ("tensors", "numbers", "")),
        table("what cannot be restored", facts["not_restored"]),
    ]


def _here(part: Mapping[str, Any], installed: Mapping[str, str | None]) -> str:
    home = part.get("distribution")
    if not home:
        return "yours"
    found = installed.get(str(home))
    return "not installed" if found is None else found
