"""Whether Horovod is installed here so that it can be used, and how it was built.

Horovod's wheel is made for one torch: another one loads it and may crash, or does not find its symbols. Horovod itself prints a line
where it was built without torch, and warns of another version.
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
    """Why Horovod cannot be used here, ending in ``Fix: ...``; ``None`` where it can be.

    Files and metadata are read first: Horovod, and with it torch, is imported only where they are right.
    """
    package = _folder("horovod")
    if package is None:
        return f"Horovod is not installed. {_FIX}"
    if not list((package / "torch").glob("mpi_lib_v2*")):
        return f"Horovod {horovod_version()} is installed without its part for torch. {_FIX}"
    built, here = built_for(), torch_version()
    if here is None:
        return "torch is not installed. Fix: pip install torch (a build for your hardware: https://pytorch.org)"
    if built != here:
        return f"Horovod {horovod_version()} was built for torch {built}, and torch {here} is installed. {_FIX}"
    if find_spec("numpy") is None:
        return "Horovod needs numpy, which it does not ask for, and which is not installed. Fix: pip install numpy"
    return _unloadable()


def _unloadable() -> str | None:
    """What importing it tells."""
    try:
        import horovod.torch as hvd
    except Exception as error:  # a symbol that another build of torch lacks, or a library of MPI or NCCL that is not here
        return (
            f"Horovod {horovod_version()} cannot be loaded: {type(error).__name__}: {error}. {_FIX}"
        )
    if not hvd.gloo_built() and not hvd.mpi_built():
        return f"Horovod {horovod_version()} was built with neither Gloo nor MPI: its processes cannot meet. {_FIX}"
    return None


def horovod_version() -> str | None:
    try:
        return version("horovod")
    except PackageNotFoundError:
        return None


def built_for() -> str | None:
    """The torch for which the installed Horovod was built, as its build noted."""
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
    """``torch.__version__`` without importing torch. The wheel's own metadata may lack the local part: 2.13.0 for 2.13.0+cu130."""
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
    """Where a package lies; it is not imported."""
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def facts() -> dict[str, Any]:
    """What ``geartrain doctor`` shows; what Horovod cannot say of itself is ``None``."""
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
    """Facts and problems, as ``geartrain doctor`` asks for them."""
    reason = missing()
    found = facts()
    problems = [] if reason is None else [reason]
    if reason is None and found["nccl"] is False and _has_cuda():
        problems.append(
            f"there is a GPU, and Horovod {found['horovod']} was built without NCCL, which GPUs need: horovod is refused on cuda. "
            f"Fix: {INSTALL} --nccl, or --accelerator cpu"
        )
    return {"facts": found, "problems": problems}


def _has_cuda() -> bool:
    """Whether torch is a CUDA build and there is a driver; no device is initialised."""
    import torch

    return torch.version.cuda is not None and Path("/proc/driver/nvidia/version").exists()
