"""The hardware that is visible without a driver's library."""

import platform
import subprocess
import sys

import pytest

from geartrain.planning import hardware


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(gpus=2)`` imitates the files and the platform of a machine."""

    def make(system="linux", arch="x86_64", gpus=None, wsl=False, nvml=False):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda: arch)
        driver = tmp_path / "gpus"
        for number in range(gpus or 0):
            (driver / f"0000:0{number}:00.0").mkdir(parents=True)
        if gpus == 0:
            driver.mkdir()
        monkeypatch.setattr(hardware, "_DRIVER", driver)
        for there, name in ((wsl, "libnvidia-ml.so.1"), (nvml, "System32/nvml.dll")):
            if there:
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).touch()
        monkeypatch.setattr(hardware, "_WSL", tmp_path / "libnvidia-ml.so.1")
        monkeypatch.setenv("SYSTEMROOT", str(tmp_path))

    return make


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        ({}, {}),
        ({"gpus": 0}, {}),  # a driver without a GPU
        ({"gpus": 1}, {"cuda": "an NVIDIA GPU"}),
        ({"gpus": 4}, {"cuda": "an NVIDIA GPU"}),
        ({"wsl": True}, {"cuda": "an NVIDIA GPU"}),
        ({"system": "win32", "nvml": True}, {"cuda": "an NVIDIA GPU"}),
        ({"system": "win32"}, {}),
        ({"system": "darwin", "arch": "arm64"}, {"mps": "an Apple GPU"}),
        ({"system": "darwin", "arch": "x86_64"}, {}),
        ({"system": "linux", "arch": "arm64"}, {}),
    ],
)
def test_visible_hardware(machine, facts, seen):
    machine(**facts)
    assert hardware.visible_devices() == seen


def test_looking_loads_neither_torch_nor_a_driver():
    code = (
        "import sys, geartrain.planning.hardware as h; h.visible_devices(); "
        "assert not {'torch', 'pynvml', 'ctypes'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
