"""Checks of the installed Horovod: can it be used, and how was it built?

Horovod's wheel is built for one version of torch. Another version may crash, or may not find the
wheel's symbols. Horovod only prints a line if it was built without torch, and only warns of another
version.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INSTALL = "python -m geartrain_horovod.install"
_FIX = f"Fix: {INSTALL} (it builds Horovod for this torch; --print shows how to do it by hand)"


def missing() -> str | None:
    """Return why Horovod cannot be used, ending in ``Fix: ...``; ``None`` if it can be.

    Files and metadata are read first. Horovod and torch are imported only if these are right.
    """
    package = _folder("horovod")
    if package is None:
        return f"Horovod is not installed. {_FIX}"
    if not list((package / "torch").glob("mpi_lib_v2*")):
        return f"Horovod {horovod_version()} is installed without its part for torch. {_FIX}"
    built, present = built_for(), torch_version()
    if present is None:
        return (
            "torch is not installed. "
            "Fix: pip install torch (a build for your hardware: https://pytorch.org)"
        )
    label = f"Horovod {horovod_version()}"
    if built != present:
        return f"{label} was built for torch {built}, and torch {present} is installed. {_FIX}"
    if find_spec("numpy") is None:
        return (
            "Horovod needs numpy, which it does not declare, and numpy is not installed. "
            "Fix: pip install numpy"
        )
    return _unloadable(label)


def _unloadable(label: str) -> str | None:
    """Import Horovod and return why it cannot be used."""
    try:
        import horovod.torch as hvd
    except Exception as error:  # torch lacks a symbol, or a library of MPI or NCCL is missing
        return f"{label} cannot be loaded: {type(error).__name__}: {error}. {_FIX}"
    if not hvd.gloo_built() and not hvd.mpi_built():
        return f"{label} was built without Gloo and MPI: its processes cannot meet. {_FIX}"
    return None


def horovod_version() -> str | None:
    """Return the version of the installed Horovod, or ``None``."""
    try:
        return version("horovod")
    except PackageNotFoundError:
        return None


def built_for() -> str | None:
    """Return the version of torch that Horovod was built for, from Horovod's metadata."""
    package = _folder("horovod")
    try:
        noted = (
            json.loads((package / "metadata.json").read_text(encoding="utf-8"))
            if package is not None
            else {}
        )
    except (OSError, ValueError):
        return None
    return noted.get("pytorch") if isinstance(noted, dict) else None


def torch_version() -> str | None:
    """Return ``torch.__version__`` without importing torch.

    The wheel's metadata may lack the local part: 2.13.0 for 2.13.0+cu130.
    """
    if _folder("torch") is None:
        return None
    try:
        return _of_torch("__version__") or version("torch")
    except PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """Return ``torch.version.cuda`` without importing torch; ``None`` for a build without CUDA."""
    return _of_torch("cuda")


def _of_torch(name: str) -> str | None:
    """Return a string of ``torch/version.py``."""
    package = _folder("torch")
    path = package / "version.py" if package is not None else None
    if path is None or not path.is_file():
        return None
    found = re.search(
        rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)", path.read_text(encoding="utf-8"), re.M
    )
    return found[1] if found else None


def _folder(package: str) -> Path | None:
    """Return a package's folder without importing it."""
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def facts() -> dict[str, Any]:
    """Return the facts that ``geartrain doctor`` shows; an unknown fact is ``None``."""
    found: dict[str, Any] = {
        "horovod": horovod_version(),
        "built_for_torch": built_for(),
        "torch": torch_version(),
    }
    found |= dict.fromkeys(("gloo", "mpi", "nccl", "cuda"))
    if missing() is None:
        import horovod.torch as hvd

        found |= {
            name: bool(getattr(hvd, f"{name}_built")()) for name in ("gloo", "mpi", "nccl", "cuda")
        }
    return found


def diagnose() -> dict[str, Any]:
    """Return facts and problems for ``geartrain doctor``."""
    reason = missing()
    found = facts()
    problems = [] if reason is None else [reason]
    if reason is None and found["nccl"] is False and _has_cuda():
        problems.append(
            f"this machine has a GPU, and Horovod {found['horovod']} was built without NCCL, which "
            f"GPUs need: horovod is refused on cuda. Fix: {INSTALL} --nccl, or --accelerator cpu"
        )
    return {"facts": found, "problems": problems}


def _has_cuda() -> bool:
    """True if torch is a CUDA build and a driver is installed. No device is initialised."""
    import torch

    return torch.version.cuda is not None and Path("/proc/driver/nvidia/version").exists()
