"""The real ``torch_tpu`` on a stand-in for libtpu: XLA's plugin for the CPU.

See pjrt_stand_in.c. Without these variables libtpu would ask the cloud's metadata server for
minutes.
"""

import atexit
import ctypes
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest


def folder_of(package):
    (folder,) = find_spec(package).submodule_search_locations
    return Path(folder)


def build():
    """Build the stand-in, and name it to torch_tpu, which asks at the import of torch."""
    library = Path(tempfile.mkdtemp(prefix="stand-in-")) / "stand_in.so"
    atexit.register(shutil.rmtree, library.parent)
    source = Path(__file__).with_name("pjrt_stand_in.c")
    header = folder_of("xla_plugins") / "xla_cpu_pjrt" / "include"
    command = ["gcc", "-shared", "-fPIC", "-I", header, source, "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    os.environ |= {
        "TPU_LIBRARY_PATH": str(library),
        "STAND_IN_PLUGIN": str(folder_of("lammps_jax_pjrt_cpu") / "pjrt_c_api_cpu_plugin.so"),
        "TPU_SKIP_MDS_QUERY": "1",
    }
    return library


LIBRARY = build() if find_spec("torch_tpu") else None


@pytest.fixture(scope="session")
def stand_in():
    """Return the library that stands for libtpu."""
    return ctypes.CDLL(str(LIBRARY))


@pytest.fixture
def tpu(stand_in):
    """Return an accelerator for the one device of the stand-in, which is on no PCI bus."""
    from geartrain_tpu import TPUAccelerator

    class StandIn(TPUAccelerator):
        @classmethod
        def device_count(cls):
            return 1

    return StandIn
