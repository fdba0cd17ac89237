"""Find the GPUs that CUDA shows this process, and their indices: read ``CUDA_VISIBLE_DEVICES``.

Sources:

- the variable:
  https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
- names of MIG instances:
  https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html
- repeated entries, junk after a number, and spaces, which these pages do not specify:
  ``torch.cuda``, whose authors tried them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from geartrain.plugin_api import warn
from geartrain_cuda.nvml import GPU, Session

_VARIABLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
#: From this driver on, CUDA shows one compute instance of each GPU instance, together with GPUs
#: without MIG. Older drivers show one instance only.
_MANY_INSTANCES = 570
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class View:
    """The GPUs that CUDA shows this process."""

    #: In the order of CUDA's indices.
    devices: tuple[GPU, ...]
    #: The value of the environment variable, or ``None``.
    variable: str | None
    #: The reason why the variable, or a part of it, shows no GPU.
    problem: str | None = None
    #: The reason why CUDA may number these GPUs in another order.
    order: str | None = None

    def warn(self) -> None:
        """Warn once if indices may mean other GPUs."""
        if self.order is not None and self.order not in _warned:
            _warned.add(self.order)
            warn(self.order)


def view(session: Session, environ: Mapping[str, str] = os.environ) -> View:
    """Return the GPUs that CUDA shows a process with this environment."""
    variable, gpus = environ.get(_VARIABLE), session.gpus()
    driver = re.match(r"\d+", session.driver() or "")
    many = driver is not None and int(driver[0]) >= _MANY_INSTANCES
    if variable is not None and variable.startswith(("GPU-", "MIG-")):
        prefix, choices = variable[:4], gpus
        if prefix == "MIG-":
            choices = [instance for gpu in gpus for instance in _instances(gpu)]
        named, problem = _named(variable, prefix, choices)
        numbered = False
    else:
        named, problem = (gpus, None) if variable is None else _numbered(variable, gpus)
        numbered = True
    models = {gpu.name for gpu in gpus if gpu.name is not None}
    order = None
    if numbered and len(models) > 1 and environ.get(_ORDER) != "PCI_BUS_ID":
        order = (
            f"the GPUs here are of different models ({', '.join(sorted(models))}): CUDA numbers "
            "the fastest first, NVML and nvidia-smi by PCI address, so an index may mean another "
            f"GPU. Fix: export {_ORDER}=PCI_BUS_ID"
        )
    devices, hidden = _as_enumerated(named, many)
    return View(tuple(devices), variable, problem or hidden, order)


# --- reading the variable -------------------------------------------------------------------------


def _numbered(variable: str, gpus: Sequence[GPU]) -> tuple[list[GPU], str | None]:
    """Read ``"1,0"``: numbers of nvidia-smi. An invalid entry hides itself and all that follow."""
    found: list[int] = []
    problem = None
    for entry in variable.split(","):
        match = re.match(r"([+-]?)0*(\d+)", entry.strip(), re.ASCII)
        # No machine has that many GPUs, and int() refuses very long texts.
        number = int(match[2][:12]) if match else -1
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
    """Read ``"GPU-8932f937,GPU-0aa1"`` or ``"MIG-..."``: UUIDs, or unique prefixes of UUIDs."""
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
        return None  # both mean that the user wants no GPU
    if not entry.strip() and ",," not in variable.replace(" ", ""):
        return None  # a comma at the end
    return (
        f"{_VARIABLE}={variable!r}: {entry!r} names no GPU here, which hides it and all entries "
        "after it. Fix: use entries that nvidia-smi -L lists"
    )


def _twice(variable: str, entry: str) -> str:
    return (
        f"{_VARIABLE}={variable!r}: {entry!r} names a GPU that is named before, and CUDA then "
        "shows no GPU. Fix: name each GPU once"
    )


# --- MIG ------------------------------------------------------------------------------------------


def _instances(gpu: GPU) -> list[GPU]:
    return gpu.instances() if gpu.in_mig_mode() else []


def _as_enumerated(named: Sequence[GPU], many: bool) -> tuple[list[GPU], str | None]:
    """Return the devices that CUDA shows for the named GPUs and instances, and any problem.

    A GPU in MIG mode stands for its instances; without instances it is not shown. Of the compute
    instances on one GPU instance, only the first is shown. Older drivers show one instance and no
    other device.
    """
    shown: list[GPU] = []
    taken: set[tuple[int, int | None]] = set()
    hidden = 0
    for gpu in named:
        for device in [gpu] if gpu.parent is not None or not gpu.in_mig_mode() else gpu.instances():
            if device.parent is not None:
                place = (device.parent.index, device.ask("nvmlDeviceGetGpuInstanceId"))
                if place in taken and place[1] is not None:
                    hidden += device in named
                    continue
                taken.add(place)
            shown.append(device)
    first = next((device for device in shown if device.parent is not None), None)
    if first is None or many or len(shown) == 1:
        problem = (
            f"{hidden} MIG instances share a GPU instance with another, and CUDA shows one of "
            "those. Fix: name one of each"
        )
        return shown, problem if hidden else None
    return [first], (
        f"this driver shows a process only one MIG instance, and no other GPU: {first.label} of "
        f"{len(shown)} devices. Fix: set {_VARIABLE} to another name for each process, or install "
        f"driver {_MANY_INSTANCES} or newer"
    )
