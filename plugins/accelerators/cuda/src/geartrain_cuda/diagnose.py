"""Report the GPUs of this machine and their problems, without a CUDA context.

For the accelerator's ``unavailable()`` and ``diagnose()``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from geartrain_cuda.nvml import GPU, Session, Unavailable, session
from geartrain_cuda.stats import throttles
from geartrain_cuda.usable import count_without_nvml, run_alone
from geartrain_cuda.visible import View, view

_INSTALL = "https://pytorch.org/get-started/locally/"


def no_gpu() -> str | None:
    """Return the reason why no GPU can be used here, or ``None``."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA. "
            f"Fix: install a build that has it, {_INSTALL}"
        )
    if torch.version.hip is not None:
        if count_without_nvml():
            return None
        return f"torch {torch.__version__} is built for ROCm, and ROCm shows no GPU"
    try:
        with session() as nvml:
            return _hidden(nvml, view(nvml))
    except Unavailable as error:
        # CUDA may work without NVML, as on some Jetsons.
        return None if count_without_nvml() else str(error)


def _hidden(nvml: Session, seen: View) -> str | None:
    """Return the reason why the driver, which is installed, shows no usable GPU, or ``None``."""
    lost = [f"{gpu.label}: {gpu.error}" for gpu in seen.devices if gpu.error is not None]
    if seen.devices:
        return "; ".join(lost) if len(lost) == len(seen.devices) else None
    every = nvml.gpus()
    if not every:
        return (
            f"NVML: the driver ({nvml.driver()}) shows no GPU. "
            "Fix: nvidia-smi -L must list one; a container needs --gpus"
        )
    if seen.variable is None:
        return (
            f"all GPUs here ({len(every)}) are in MIG mode and have no instance. "
            "Fix: nvidia-smi mig -cgi, or nvidia-smi -mig 0"
        )
    return seen.problem or (
        f"CUDA_VISIBLE_DEVICES={seen.variable!r} shows none of the {len(every)} GPUs here. "
        "Fix: unset it, or name some"
    )


def diagnose() -> dict[str, Any]:
    """Return facts, devices and problems. Never raises.

    Returns:
        A dictionary of three parts:

        - ``facts``: name -> a text or ``None``.
        - ``devices``: the devices that CUDA shows. Each has ``index, name, uuid, memory_used_mib,
          memory_total_mib, compute_mode, processes`` (``pid, name, memory_mib``) and ``mig`` (the
          place of an instance, ``"enabled"`` or ``None``). A value that NVML does not know is
          ``None``.
        - ``problems``: sentences that end in ``Fix: ...``.
    """
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "cudnn": _cudnn(),
        "nccl": _nccl(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": None,
        "driver_cuda": None,
        "nvml": "ok",
    }
    devices: list[dict[str, Any]] = []
    problems: list[str] = []
    try:
        with session() as nvml:
            seen, cuda = view(nvml), nvml.driver_cuda()
            facts["driver"] = nvml.driver()
            facts["driver_cuda"] = None if cuda is None else f"{cuda[0]}.{cuda[1]}"
            devices = [_device(index, gpu) for index, gpu in enumerate(seen.devices)]
            of_view = filter(None, [seen.problem, seen.order])
            problems = [*_of_torch(cuda), *of_view, *_of_gpus(nvml, seen)]
    except Unavailable as error:
        facts["nvml"] = str(error)
        if torch.version.cuda is not None:
            hint = ". Fix: load the NVIDIA driver (nvidia-smi must work)"
            problems.append(f"{error}{'' if 'Fix: ' in str(error) else hint}")
    except Exception as error:  # the report must not fail
        problems.append(
            f"NVML returned an unexpected value: {type(error).__name__}: {error}. "
            "Fix: install another nvidia-ml-py or driver"
        )
    return {"facts": facts, "devices": devices, "problems": problems}


def _or_none(ask: Callable[[], Any]) -> str | None:
    try:
        found = ask()
    except Exception:  # a library that torch was built with is missing here
        return None
    return None if found is None else str(found)


@cache
def _description() -> str:
    """Return torch's description of its build, or "" if it has none.

    Another process asks. The description, ``torch.backends.cudnn.version()`` and
    ``torch.cuda.get_arch_list()`` initialize CUDA's driver, and a process that is forked after that
    cannot use CUDA.
    """
    if torch.version.cuda is None:
        return ""
    text, error = run_alone("import torch; print(torch.__config__.show())", {})
    return text if error is None else ""


def _cudnn() -> str | None:
    found = re.search(r"CuDNN ([\d.]+)", _description())
    return None if found is None else found[1]


def _architectures() -> list[str]:
    """Return the architectures that torch is built for, such as ``sm_90``."""
    return re.findall(r"code=(\w+)", _description())


def _nccl() -> str | None:
    if torch.version.cuda is None:
        return None
    return _or_none(lambda: ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]


def _device(index: int, gpu: GPU) -> dict[str, Any]:
    memory, found = gpu.memory(), gpu.processes()
    processes: list[dict[str, Any]] | None = None
    if found is not None:
        processes = [{"pid": p.pid, "name": p.name, "memory_mib": p.memory_mib} for p in found]
    mig: str | None
    if gpu.parent is not None:
        place = gpu.ask("nvmlDeviceGetGpuInstanceId"), gpu.ask("nvmlDeviceGetComputeInstanceId")
        mig = f"GPU instance {place[0]}, compute instance {place[1]} of {gpu.parent.label}"
    else:
        mig = "enabled" if gpu.in_mig_mode() else None
    return {
        "index": index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "memory_used_mib": None if memory is None else memory[0],
        "memory_total_mib": None if memory is None else memory[1],
        "compute_mode": gpu.compute_mode(),
        "processes": processes,
        "mig": mig,
    }


def _of_torch(driver_cuda: tuple[int, int] | None) -> list[str]:
    """Return problems of torch's build with the installed driver."""
    if torch.version.hip is not None:
        return []
    if torch.version.cuda is None:
        return [
            "an NVIDIA driver is installed, but "
            f"torch {torch.__version__} is built without CUDA. "
            f"Fix: install a CUDA build of torch, {_INSTALL}"
        ]
    # CUDA programs run on older drivers of the same major version:
    # https://docs.nvidia.com/deploy/cuda-compatibility/
    if driver_cuda is not None and driver_cuda[0] < int(torch.version.cuda.partition(".")[0]):
        newest = f"{driver_cuda[0]}.{driver_cuda[1]}"
        return [
            f"torch is built for CUDA {torch.version.cuda}, but the driver runs CUDA up to "
            f"{newest}. Fix: install a newer driver, or torch for CUDA {driver_cuda[0]}, {_INSTALL}"
        ]
    return []


def _of_gpus(nvml: Session, seen: View) -> list[str]:
    problems = []
    if not seen.devices:
        problems.append(_hidden(nvml, seen) or "")
    for gpu in seen.devices:
        owner = gpu.parent or gpu
        error = gpu.error or owner.error
        if error is not None:
            problems.append(
                f"{gpu.label}: {error}. "
                "Fix: look for its Xid error in dmesg, reset it (nvidia-smi -r) or restart"
            )
            continue
        if gpu.compute_mode() == "prohibited":
            problems.append(
                f"{gpu.label} accepts no compute processes (mode PROHIBITED). "
                f"Fix: nvidia-smi -i {owner.index} -c DEFAULT"
            )
        memory_errors = owner.ask(
            "nvmlDeviceGetTotalEccErrors",
            gpu.constant("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
            gpu.constant("NVML_VOLATILE_ECC"),
        )
        if memory_errors:
            problems.append(
                f"{gpu.label} had {memory_errors} memory errors that ECC could not correct. "
                "Fix: reset it (nvidia-smi -r)"
            )
        flags = throttles(owner)
        slowed = [name for name in ("thermal", "hw_slowdown") if flags.get(f"throttled_{name}")]
        if slowed:
            problems.append(
                f"{gpu.label} is slowed down ({', '.join(slowed)}). "
                "Fix: check its cooling and power supply"
            )
        problems += _too_new(gpu, owner)
    return [problem for problem in dict.fromkeys(problems) if problem and problem != seen.problem]


def _too_new(gpu: GPU, owner: GPU) -> list[str]:
    """Return a problem if torch has neither kernels for this GPU nor code to compile for it."""
    capability, built = owner.ask("nvmlDeviceGetCudaComputeCapability"), _architectures()
    if capability is None or not built or torch.version.hip is not None:
        return []
    major, minor = capability
    for kind, high, low, only in re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(built)):
        made = int(high), int(low)
        if made == (major, minor) or (
            not only and made <= (major, minor) and (kind == "compute" or made[0] == major)
        ):
            return []
    return [
        f"torch {torch.__version__} has no kernels for {gpu.label}, of compute capability "
        f"{major}.{minor}. Fix: install another build, {_INSTALL}"
    ]
