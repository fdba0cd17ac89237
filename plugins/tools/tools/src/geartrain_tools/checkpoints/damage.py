"""``geartrain ckpt verify``: find the damaged parts of a checkpoint."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from geartrain import TrainingError
from geartrain_tools.checkpoints.contents import (
    FORMAT,
    is_of_geartrain,
    leaves,
    mapping,
    parsed,
    read,
    sequence,
    tensors_of,
)

_CHUNK = 2**20
#: What ``fit`` needs under ``"fit"`` -> the type.
_NEEDED: Mapping[str, type] = {
    **dict.fromkeys(("step", "epoch", "batch_idx", "batches_seen"), int),
    **dict.fromkeys(("optimizers", "schedulers", "ranks"), list),
    **dict.fromkeys(("parts", "seeds"), dict),
}


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged part of a file."""

    part: str
    problem: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one file."""

    damages: list[Damage]
    #: What a user should know of a file that is not damaged.
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the facts for ``--json``."""
        found = [{"part": each.part, "problem": each.problem} for each in self.damages]
        return {"damaged": bool(found), "damages": found, "notes": self.notes}


def verify(path: Path) -> Verdict:
    """Compare every part of a file with its checksum, then check its format and its contents."""
    try:
        damages, comment = _damaged_records(path)
    except OSError as error:
        return Verdict([Damage("the file", f"it cannot be read: {error.strerror}")], [])
    if damages:
        return Verdict(damages, [])
    try:
        state = read(path)
        list(leaves(state))
    except TrainingError as error:
        message, _, _ = str(error).partition(" Fix: ")
        return Verdict([Damage("the contents", message.removeprefix(f"{path} "))], [])
    damages = [*_wrong_progress(state, comment), *_wrong_contents(state)]
    return Verdict(damages, [] if damages else list(_notes(state, comment)))


# --- the archive ----------------------------------------------------------------------------------


def _damaged_records(path: Path) -> tuple[list[Damage], bytes]:
    """Read a whole archive; return its damaged records, and its comment."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            found = {r.filename: _error_of(archive, r) for r in records}
            damaged = {name: error for name, error in found.items() if error}
            if not any(name.endswith("/data.pkl") for name in found):
                return [Damage("the file", "it was not written by torch.save")], b""
            comment = archive.comment
    except OSError:
        raise
    except Exception:  # damage may make any error
        return [Damage("the file", _broken_archive(path))], b""
    if comment.startswith(b"geartrain") and not is_of_geartrain(comment):
        return [Damage("its end", "the last bytes of the archive are missing or changed")], b""
    tensors = _tensors_by_record(path, records) if damaged else {}
    return [Damage(_part(name, tensors), error) for name, error in damaged.items()], comment


def _error_of(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> str:
    if record.external_attr & 16:
        return "it is marked as a folder, so that torch would not read it"
    try:
        with archive.open(record) as file:
            while file.read(_CHUNK):
                pass
    except zipfile.BadZipFile as error:
        if "CRC" in str(error):
            return "its contents do not match its checksum"
        return "its beginning in the archive is damaged"
    except Exception as error:
        return f"it cannot be read ({type(error).__name__})"
    return ""


def _broken_archive(path: Path) -> str:
    with path.open("rb") as file:
        begin = file.read(4)
    length = path.stat().st_size
    if not length:
        return "it is empty"
    if not begin.strip(b"\0"):
        return "it begins with zeros, as after a power cut"
    if begin[:2] == b"PK":
        return f"its end is missing or damaged: it was cut, and has {length} bytes"
    return "it is no archive of torch.save, or its beginning is damaged"


def _part(name: str, tensors: Mapping[str, list[str]]) -> str:
    """Return what a record of the archive holds."""
    record = name.partition("/")[2]
    if record == "data.pkl":
        return "names and settings (data.pkl)"
    if not record.startswith("data/"):
        return f"a record of torch ({record})"
    names = tensors.get(name, [])
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} ({record})" if names else f"a tensor ({record})"


def _tensors_by_record(path: Path, records: list[zipfile.ZipInfo]) -> dict[str, list[str]]:
    """Return the names of the tensors in each record; nothing if the names are damaged.

    The file is mapped, so storages lie in memory in the order of their records.
    """
    stored = [r for r in records if r.filename.partition("/")[2].startswith("data/")]
    stored = sorted((r for r in stored if r.file_size), key=lambda record: record.header_offset)
    try:
        tensors = tensors_of(read(path))
    except TrainingError:
        return {}
    places: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.untyped_storage().nbytes():
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    if len(places) != len(stored):
        return {}
    return {r.filename: places[p] for r, p in zip(stored, sorted(places), strict=True)}


# --- the contents ---------------------------------------------------------------------------------


def _wrong_progress(state: Mapping[str, Any], comment: bytes) -> Iterator[Damage]:
    progress, fit = parsed(comment), mapping(state.get("fit"))
    inside = tuple(fit.get(name) for name in ("epoch", "step", "batch_idx"))
    if progress is not None and progress.key != inside:
        problem = f"the archive's comment has {progress.key}, and the contents have {inside}"
        yield Damage("epoch, step and batch", problem)


def _wrong_contents(state: Mapping[str, Any]) -> Iterator[Damage]:
    for name in ("step", "epoch"):
        if name in state and not _counts(state[name]):
            yield Damage(name, f"it is {state[name]!r}, not a number of 0 or more")
    fit = state.get("fit")
    if fit is None:
        return
    if not isinstance(fit, dict) or not _counts(fit.get("format")):
        yield Damage("fit", "it has no format")
        return
    if fit["format"] != FORMAT:
        return  # a note says so: its keys may be others
    for name, kind in _NEEDED.items():
        if not isinstance(fit.get(name), kind):
            yield Damage(f"fit.{name}", "it is missing, or of another type")
    if "ranks" in fit and not sequence(fit["ranks"]):
        yield Damage("fit.ranks", "it has the state of no rank")
    for index, optimizer in enumerate(sequence(fit.get("optimizers"))):
        names = sequence(mapping(optimizer).get("parameters"))
        groups = sequence(mapping(mapping(optimizer).get("state")).get("param_groups"))
        count = sum(len(sequence(mapping(group).get("params"))) for group in groups)
        if len(names) != count:
            problem = f"it names {len(names)} parameters, and its groups have {count}"
            yield Damage(f"fit.optimizers.{index}", problem)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _notes(state: Mapping[str, Any], comment: bytes) -> Iterator[str]:
    fit = state.get("fit")
    if not is_of_geartrain(comment):
        yield "geartrain did not write it: --resume FILE reads it, --resume alone does not"
    if fit is None:
        yield "it has only weights: a fit cannot resume from it"
    elif fit["format"] != FORMAT:
        yield f"it has format {fit['format']}, and this version resumes from format {FORMAT}"
    for name in ("model", "trained", "average"):
        wrong = [n for n, t in tensors_of(state.get(name, {})).items() if _is_not_finite(t)]
        if wrong:
            more = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
            yield f"NaN or infinity in {name}: {wrong[0]}{more}"


def _is_not_finite(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all())
