"""The checks ``versions``, ``accelerators`` and ``plugins``."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from geartrain import UsageError, __version__
from geartrain.plugin_api import KNOWN, InstalledPlugin, Registry
from geartrain_tools.doctor.findings import Section

_DRIVER = Path("/proc/driver/nvidia/version")
#: The keys that ``diagnose()`` may return, and the types of their values.
_DIAGNOSIS: dict[str, type] = {"facts": Mapping, "devices": list, "problems": list}


# --- versions -------------------------------------------------------------------------------------


def versions(section: Section, registry: Registry) -> None:
    """Check Python, torch, geartrain's distributions, and that their requirements are installed."""
    facts = section.facts
    facts |= {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "geartrain": __version__,
    }
    installed = {
        candidate.distribution: candidate
        for candidate in registry.candidates
        if candidate.entry_point.dist is not None
    }
    facts["distributions"] = {
        name: candidate.version for name, candidate in sorted(installed.items())
    }
    facts["torch"] = None
    for candidate in installed.values():
        for message, hint in _unmet(candidate):
            section.problem(message, hint)
    facts["nvidia_driver"] = _nvidia_driver()
    if not has_torch():
        section.problem(
            "torch is not installed",
            "pip install torch (a build for your hardware: https://pytorch.org)",
        )
        return
    facts |= _torch()
    if facts["nvidia_driver"] and facts["torch_build"] == "CPU":
        section.warn(
            f"an NVIDIA driver is installed, but torch {facts['torch']} is a build without CUDA",
            "pip install a CUDA build of torch",
        )
    if facts["nvidia_driver"] and not any(
        candidate.name == "cuda" for candidate in registry.of("accelerator")
    ):
        section.warn(
            "an NVIDIA driver is installed, but no cuda accelerator",
            f"pip install {KNOWN['accelerator', 'cuda']}",
        )


def _unmet(candidate: InstalledPlugin) -> Iterator[tuple[str, str]]:
    """Yield each unmet requirement of a candidate's distribution, with its fix."""
    dist, label = candidate.entry_point.dist, f"{candidate.distribution} {candidate.version}"
    for line in dist.requires or () if dist is not None else ():
        try:
            needed = Requirement(line)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            version = importlib_metadata.version(needed.name)
            met = needed.specifier.contains(version, prereleases=True)
        except importlib_metadata.PackageNotFoundError:
            if needed.name != "torch":
                yield (
                    f"{label} requires {_plain(needed)}, which is not installed",
                    f"pip install '{_plain(needed)}'",
                )
        except (InvalidRequirement, InvalidVersion) as error:
            yield (
                f"{label} requires {line!r}, which cannot be read: {error}",
                f"report it to the author of {candidate.distribution}",
            )
        except Exception as error:  # each file may be missing, malformed or not UTF-8
            yield (
                f"the metadata of {needed.name}, which {label} requires, cannot be read: {error}",
                f"pip install --force-reinstall '{_plain(needed)}'",
            )
        else:
            if not met:
                yield (
                    f"{label} requires {_plain(needed)}, but {needed.name} {version} is installed",
                    f"pip install '{_plain(needed)}', or another version of "
                    f"{candidate.distribution}",
                )


def _plain(needed: Requirement) -> str:
    return f"{needed.name}{needed.specifier}"


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _torch() -> dict[str, Any]:
    """Return torch's version, build and backends, without a call to any device."""
    import torch
    import torch.distributed as dist

    cuda, rocm = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU"
    nccl = None
    if dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "torch_build": build,
        "torch_cuda": cuda,
        "torch_nccl": nccl,
        "torch_backends": backends(),
    }


def backends() -> list[str]:
    """Return the torch.distributed backends of this torch."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    # "fake" is torch's backend for tests: it sends nothing.
    return [
        name
        for name in dist.Backend.backend_list
        if name not in ("undefined", "fake") and dist.is_backend_available(name)
    ]


def _nvidia_driver() -> str | None:
    try:
        text = _DRIVER.read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


# --- accelerators ---------------------------------------------------------------------------------


def accelerators(section: Section, registry: Registry, wanted: str) -> None:
    """Check each accelerator and its ``diagnose()``, and choose the one that a run would take."""
    classes = {
        candidate.label: _load(section, registry, candidate)
        for candidate in registry.of("accelerator")
    }
    for candidate in registry.of("accelerator"):
        if (
            candidate.state == "available"
            and registry.check_usable(candidate) is None
            and candidate.state == "failed"
        ):
            section.problem(
                f"{candidate.label} raised in its check of this machine: {candidate.reason}",
                _reinstall(candidate),
            )
    section.facts["chosen"] = _choose(section, registry, wanted)
    section.facts["accelerators"] = [
        _accelerator(section, candidate, classes[candidate.label], wanted.lower())
        for candidate in registry.of("accelerator")
    ]


def _choose(section: Section, registry: Registry, wanted: str) -> dict[str, Any] | None:
    try:
        part, passed_over = registry.select_accelerator(wanted, {}, {})
    except UsageError as error:
        if has_torch():  # otherwise the missing torch is the reason, and it is already reported
            hint = "" if "Fix: " in str(error) else "fix the cause, or --accelerator auto"
            section.problem(str(error), hint)
        return None
    return {"name": part.info.name, "why": part.info.reason, "passed_over": passed_over}


def _accelerator(
    section: Section, candidate: InstalledPlugin, cls: Any, wanted: str
) -> dict[str, Any]:
    """Return the row of one accelerator."""
    row: dict[str, Any] = {
        **candidate.as_dict(),
        "priority": getattr(cls, "priority", None),
        "device_count": None,
        "diagnosis": None,
    }
    if cls is None or candidate.state not in ("selected", "available", "unavailable"):
        return row
    if candidate.state != "unavailable":
        row["device_count"] = _asked(section, candidate, "device_count", cls.device_count)
    if hasattr(cls, "diagnose"):
        # Problems of a device that the run would not use need not be fixed.
        row["diagnosis"] = _diagnosis(
            section,
            candidate,
            cls,
            must=candidate.state == "selected" or wanted in ("gpu", candidate.name.lower()),
        )
    return row


def _asked(section: Section, candidate: InstalledPlugin, name: str, ask: Any) -> Any:
    """Return the plugin's answer; if it raises, add a problem with its name and return ``None``."""
    try:
        return ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        section.problem(
            f"{candidate.label}: its {name}() fails: {type(error).__name__}: {error}",
            _reinstall(candidate),
        )
        return None


def checked(given: Any) -> dict[str, Any]:
    """Return the result of a plugin's ``diagnose()`` as a dict, after a check of its form.

    Args:
        given: the result, in the form that docs/doctor.md describes.

    Raises:
        TypeError: the form is wrong.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"it returned {given!r}, not a mapping of {', '.join(_DIAGNOSIS)}")
    for key, value in given.items():
        if key not in _DIAGNOSIS or not isinstance(value, _DIAGNOSIS[key]):
            raise TypeError(
                f"it returned {key!r}: {value!r}; known are facts (a mapping), devices (a list) "
                "and problems (a list)"
            )
    items: list[tuple[str, Any, type]] = [
        ("devices", item, Mapping) for item in given.get("devices", ())
    ]
    items += [("problems", item, str) for item in given.get("problems", ())]
    items += [
        ("processes", item, Mapping)
        for device in given.get("devices", ())
        for item in _processes(device)
    ]
    for key, item, kind in items:
        if not isinstance(item, kind):
            raise TypeError(f"it returned {item!r} among its {key}, not a {kind.__name__.lower()}")
    json.dumps(given)  # raises TypeError for values that --json could not show
    return dict(given)


def _processes(device: Any) -> list[Any]:
    found = device.get("processes") if isinstance(device, Mapping) else None
    return found if isinstance(found, list) else [] if found is None else [found]


# --- strategies and plugins -----------------------------------------------------------------------


def plugins(section: Section, registry: Registry) -> None:
    """Import each strategy and plugin, and call its ``diagnose()`` if it has one."""
    section.facts["plugins"] = rows = []
    for candidate in (*registry.of("strategy"), *registry.of("plugin")):
        cls = _load(section, registry, candidate)
        row: dict[str, Any] = {**candidate.as_dict(), "diagnosis": None}
        if hasattr(cls, "diagnose"):
            # Warnings only: no run has chosen this plugin.
            row["diagnosis"] = _diagnosis(section, candidate, cls, must=False)
        rows.append(row)


def _diagnosis(
    section: Section, candidate: InstalledPlugin, cls: Any, must: bool
) -> dict[str, Any] | None:
    """Return the result of a class's ``diagnose()``; add its problems as findings."""
    diagnosis: dict[str, Any] | None = _asked(
        section, candidate, "diagnose", lambda: checked(cls.diagnose())
    )
    for problem in (diagnosis or {}).get("problems", ()):
        section.problem(f"{candidate.label}: {problem}", must=must)
    return diagnosis


def _load(section: Section, registry: Registry, candidate: InstalledPlugin) -> Any:
    """Return a candidate's class. ``None`` if it is blocked, or (with a problem) not importable."""
    if candidate.contested and candidate.state == "failed":
        message, _, hint = candidate.reason.partition("; ")
        section.problem(f"{candidate.kind} {candidate.name!r}: {message}", hint)
    if candidate.state != "available":
        return None
    try:
        loaded = registry.load(candidate)
        candidate.probed = candidate.kind != "accelerator"  # those are also asked
        return loaded
    except UsageError as error:
        # A missing torch is already reported, once for all plugins.
        if has_torch() or getattr(error.__cause__, "name", None) != "torch":
            section.problem(str(error))
        return None


def _reinstall(candidate: InstalledPlugin) -> str:
    return (
        f"install another version of {candidate.distribution}, or --block {candidate.name}; "
        "report it to its author"
    )
