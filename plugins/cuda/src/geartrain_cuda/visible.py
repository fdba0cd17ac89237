"""Which GPUs CUDA shows this process, and under which index: ``CUDA_VISIBLE_DEVICES`` as CUDA reads it.

The variable: https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html; how MIG instances are
numbered: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html. What those pages leave open (repeated entries,
junk after a number, spaces) is as in ``torch.cuda``, which measured it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from geartrain_cuda.nvml import GPU, Session

_VARIABLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
#: From this driver on CUDA shows an instance of each GPU instance, and GPUs without MIG beside them; before, one instance alone.
_MANY_INSTANCES = 570
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class View:
    """The GPUs that CUDA shows this process; their place in ``devices`` is CUDA's index."""

    devices: tuple[GPU, ...]
    #: What the environment says, or ``None``.
    variable: str | None
    #: Why the variable, or a part of it, shows nothing.
    problem: str | None = None
    #: Why CUDA may number these GPUs in another order.
    order: str | None = None

    def warn(self) -> None:
        """Say once that indices may mean other GPUs."""
        if self.order is not None and self.order not in _warned:
            _warned.add(self.order)
            warnings.warn(self.order, stacklevel=3)


def view(session: Session, environ: Mapping[str, str] = os.environ) -> View:
    """What CUDA shows a process with this environment."""
    variable, gpus = environ.get(_VARIABLE), session.gpus()
    driver = re.match(r"\d+", session.driver() or "")
    many = driver is not None and int(driver[0]) >= _MANY_INSTANCES
    if variable is not None and variable.startswith(("GPU-", "MIG-")):
        prefix = variable[:4]
        named, problem = _named(
            variable,
            prefix,
            gpus if prefix == "GPU-" else [i for gpu in gpus for i in _instances(gpu)],
        )
        numbered = False
    else:
        named, problem = (gpus, None) if variable is None else _numbered(variable, gpus)
        numbered = True
    models = {gpu.name for gpu in gpus if gpu.name is not None}
    order = None
    if numbered and len(models) > 1 and environ.get(_ORDER) != "PCI_BUS_ID":
        order = (
            f"the GPUs here are of different models ({', '.join(sorted(models))}): CUDA numbers the fastest first, NVML and "
            f"nvidia-smi by PCI address, so an index may mean another GPU. Fix: export {_ORDER}=PCI_BUS_ID"
        )
    devices, hidden = _as_enumerated(named, many)
    return View(tuple(devices), variable, problem or hidden, order)


# --- reading the variable ------------------------------------------------------------------------------------------------


def _numbered(variable: str, gpus: Sequence[GPU]) -> tuple[list[GPU], str | None]:
    """``"1,0"``: numbers of nvidia-smi; the first entry that is none hides itself and whatever follows."""
    found: list[int] = []
    problem = None
    for entry in variable.split(","):
        match = re.match(r"([+-]?)0*(\d+)", entry.strip(), re.ASCII)
        number = (
            int(match[2][:12]) if match else -1
        )  # no machine has GPUs of so many digits, and int() refuses very many
        index = -number if match and match[1] == "-" else number
        if index in found:
            return [], _twice(variable, entry)
        if index < 0:
            problem = _stops(variable, entry)
            break
        found.append(index)
    beyond = next((place for place, index in enumerate(found) if index >= len(gpus)), None)
    if beyond is not None:
        found, problem = found[:beyond], _stops(variable, str(found[beyond]))
    return [gpus[index] for index in found], problem


def _named(variable: str, prefix: str, gpus: Sequence[GPU]) -> tuple[list[GPU], str | None]:
    """``"GPU-8932f937,GPU-0aa1"`` or ``"MIG-..."``: UUIDs, or beginnings of UUIDs that no other has."""
    entries: list[str] = []
    problem = None
    for entry in variable.split(","):
        if entry in entries:
            return [], _twice(variable, entry)
        if not entry.startswith(prefix):
            problem = _stops(variable, entry)
            break
        entries.append(entry)
    found: list[GPU] = []
    for entry in entries:
        matches = [gpu for gpu in gpus if _is_called(gpu, entry)]
        if len(matches) != 1:
            return found, _stops(variable, entry)
        if matches[0] in found:
            return [], _twice(variable, entry)
        found.append(matches[0])
    return found, problem


def _is_called(gpu: GPU, name: str) -> bool:
    old = re.fullmatch(r"MIG-(GPU-[^/]*)/(\d{1,9})/(\d{1,9})", name, re.ASCII)
    if old is None:
        return (gpu.uuid or "").startswith(name)
    if gpu.parent is None or not (gpu.parent.uuid or "").startswith(old[1]):
        return False
    place = gpu.ask("nvmlDeviceGetGpuInstanceId"), gpu.ask("nvmlDeviceGetComputeInstanceId")
    return place == (int(old[2]), int(old[3]))


def _stops(variable: str, entry: str) -> str | None:
    if variable == "" or entry.strip() == "-1":
        return None  # both are how people ask for no GPU
    if not entry.strip() and ",," not in variable.replace(" ", ""):
        return None  # a comma at the end
    return f"{_VARIABLE}={variable!r}: {entry!r} names no GPU here, which hides it and whatever follows. Fix: nvidia-smi -L lists them"


def _twice(variable: str, entry: str) -> str:
    return f"{_VARIABLE}={variable!r}: {entry!r} names a GPU that is named before, and CUDA then shows none. Fix: name each once"


# --- MIG -----------------------------------------------------------------------------------------------------------------


def _instances(gpu: GPU) -> list[GPU]:
    return gpu.instances() if gpu.in_mig_mode() else []


def _as_enumerated(named: Sequence[GPU], many: bool) -> tuple[list[GPU], str | None]:
    """What CUDA makes of GPUs and instances that are named: a GPU in MIG mode stands for its instances, and is nothing without any;
    of the compute instances on one GPU instance the first counts; an older driver shows one instance, and nothing beside it."""
    shown: list[GPU] = []
    taken: set[tuple[int, int | None]] = set()
    left_out = 0
    for gpu in named:
        for device in [gpu] if gpu.parent is not None or not gpu.in_mig_mode() else gpu.instances():
            if device.parent is not None:
                place = (device.parent.index, device.ask("nvmlDeviceGetGpuInstanceId"))
                if place in taken and place[1] is not None:
                    left_out += device in named
                    continue
                taken.add(place)
            shown.append(device)
    first = next((device for device in shown if device.parent is not None), None)
    if first is None or many or len(shown) == 1:
        return (
            shown,
            f"{left_out} MIG instances share a GPU instance with another, and CUDA shows one of those. Fix: name one of each"
            if left_out
            else None,
        )
    return [first], (
        f"this driver shows a process one MIG instance, and no GPU beside it: {first.label} of {len(shown)} devices. "
        f"Fix: {_VARIABLE} with another name for each process, or driver {_MANY_INSTANCES} or newer"
    )
