"""``python -m geartrain_horovod.install``: build and install Horovod for the installed torch.

``pip install horovod`` fails after minutes: its CMake files ask for C++14, and torch's headers need
C++17. This module appends the standard to every call of the compiler and changes nothing in
Horovod. It keeps the wheel under a name that contains everything the wheel depends on: pip's cache
could return a wheel that was built for another torch or with other options.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from geartrain_horovod.installed import missing, torch_cuda, torch_version

__all__ = ["main", "missing"]

VERSION = "0.28.1"
#: The number of log lines that a failed build prints.
_SHOWN = 30
#: The CUDA toolkit's folder if no variable names another.
_CUDA = "/usr/local/cuda"
_CPU_TORCH = (
    "pip install --force-reinstall torch=={} --index-url https://download.pytorch.org/whl/cpu"
)
#: The first CMake that reads CMAKE_CXX_COMPILER_LAUNCHER, and the first that refuses old projects
#: unless CMAKE_POLICY_VERSION_MINIMUM is set.
_LAUNCHER_SINCE, _POLICY_SINCE = (3, 17), (4, 0)


class InstallError(Exception):
    """Something is missing or failed; the message contains the fix."""


@dataclass
class Recipe:
    """The recipe for a build of Horovod on this machine.

    Raises:
        InstallError: something that the build needs is missing.
    """

    mpi: bool = False
    nccl: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    #: Environment variables of the build.
    variables: dict[str, str] = field(init=False)
    #: A script to use as CXX, if no variable can add the compiler's flag.
    wrapper: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        found = torch_version()
        if found is None:
            raise InstallError(
                "torch is not installed, and Horovod is built for one version of torch. "
                "Fix: pip install torch first"
            )
        self.torch = found
        compiler = self._compiler()
        cmake = self._cmake()
        self._check()
        self.variables = self._variables(cmake)
        # gloo's MPI part needs C++20; Open MPI's C++ header works with both.
        flag = "-std=c++20" if self.mpi else "-std=c++17"
        if shutil.which("ccache", path=self.environ.get("PATH")) or cmake < _LAUNCHER_SINCE:
            # If ccache is installed, Horovod's CMake files use it as the launcher.
            self.wrapper = f'#!/bin/sh\nexec {compiler} "$@" {flag}\n'
        else:
            self.variables["CMAKE_CXX_COMPILER_LAUNCHER"] = f'sh;-c;exec "$0" "$@" {flag}'

    def _compiler(self) -> str:
        named = self.environ.get("CXX")
        for name in [named] if named else ["c++", "g++", "clang++"]:
            if shutil.which(shlex.split(name)[0], path=self.environ.get("PATH")):
                return name
        raise InstallError(
            f"no C++ compiler was found ({named or 'c++, g++ or clang++'}). "
            "Fix: apt-get install g++, or set CXX"
        )

    def _cmake(self) -> tuple[int, ...]:
        name = self.environ.get("HOROVOD_CMAKE", "cmake")
        path = shutil.which(name, path=self.environ.get("PATH"))
        if path is None:
            raise InstallError(
                f"{name} was not found. Fix: pip install cmake, or apt-get install cmake"
            )
        output = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=False, env=dict(self.environ)
        ).stdout
        found = re.search(r"version\s+(\d+)\.(\d+)", output)
        cmake = (int(found[1]), int(found[2])) if found else (0, 0)
        if cmake < (3, 13):
            raise InstallError(
                f"{path} is older than 3.13. "
                "Fix: pip install cmake, or set HOROVOD_CMAKE to a newer one"
            )
        return cmake

    def _check(self) -> None:
        """Raise if something else that the build needs is missing."""
        path = self.environ.get("PATH")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            raise InstallError(
                "Python's headers are not installed. Fix: apt-get install python3-dev"
            )
        for module, name in (
            ("pip", "pip"),
            ("setuptools", "setuptools"),
            ("packaging", "packaging"),
        ):
            if find_spec(module) is None:
                hint = "python -m ensurepip" if name == "pip" else f"pip install {name}"
                raise InstallError(f"the build needs {name}, which is not installed. Fix: {hint}")
        # An older setuptools than 70.1 makes no wheel without the package wheel. Python 3.11's venv
        # installs one.
        if find_spec("wheel") is None and int(version("setuptools").partition(".")[0]) < 71:
            raise InstallError(
                f"setuptools {version('setuptools')} cannot make a wheel. "
                "Fix: pip install --upgrade setuptools"
            )
        if self.mpi and shutil.which("mpicxx", path=path) is None:
            raise InstallError(
                "mpicxx was not found. "
                "Fix: apt-get install openmpi-bin libopenmpi-dev, or leave --mpi out"
            )
        if self.nccl and not self._has_toolkit():
            raise InstallError(
                "nvcc was not found. "
                "Fix: install the CUDA toolkit and set HOROVOD_CUDA_HOME, or leave --nccl out"
            )
        if (cuda := torch_cuda()) is not None and not self._has_toolkit():
            for_cpu = _CPU_TORCH.format(self.torch.partition("+")[0])
            raise InstallError(
                f"torch {self.torch} is built for CUDA {cuda}, and Horovod's build for it needs "
                f"the CUDA toolkit: nvcc was not found. Fix: {for_cpu} (torch's build for the "
                "CPU), then run this command again; or install the CUDA toolkit and set "
                "HOROVOD_CUDA_HOME"
            )

    def _has_toolkit(self) -> bool:
        homes = [self.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
        folders = [os.path.join(home, "bin") for home in (*homes, _CUDA) if home]
        return (
            shutil.which("nvcc", path=os.pathsep.join([*folders, self.environ.get("PATH", "")]))
            is not None
        )

    def _variables(self, cmake: tuple[int, ...]) -> dict[str, str]:
        """Return the build's variables. A variable that the user has set keeps its value."""
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        else:
            cores = os.cpu_count() or 1
        given = {
            "MAKEFLAGS": f"-j{cores}",
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
        }
        given |= (
            {"HOROVOD_WITH_MPI": "1"}
            if self.mpi
            else {"HOROVOD_WITHOUT_MPI": "1", "HOROVOD_CPU_OPERATIONS": "GLOO"}
        )
        if self.nccl:
            given["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        if cmake >= _POLICY_SINCE:
            given["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"
        return {name: self.environ.get(name, value) for name, value in given.items()}

    @property
    def key(self) -> str:
        """Everything that the wheel depends on, as the name of a folder."""
        parts = [
            f"horovod-{VERSION}",
            f"torch-{self.torch}",
            f"cp{sys.version_info[0]}{sys.version_info[1]}",
            platform.machine(),
        ]
        parts += ["mpi"] * self.mpi + ["nccl"] * self.nccl
        # Horovod's other variables and the compiler's flags also change the wheel.
        variables = {
            name: value
            for name, value in self.environ.items()
            if re.match(r"HOROVOD_|(CXX|C|LD)(FLAGS)?$", name)
        }
        variables = {
            name: value for name, value in variables.items() if not re.match(_OF_A_RUN, name)
        }
        if variables:
            parts.append(f"{zlib.crc32(repr(sorted(variables.items())).encode()):08x}")
        return "-".join([*parts, sys.platform])

    def script(self) -> str:
        """Return the recipe as shell commands."""
        lines = [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        if self.wrapper is not None:
            lines += [
                f"printf '%s' {shlex.quote(self.wrapper)} > horovod-c++",
                "chmod +x horovod-c++",
                'export CXX="$PWD/horovod-c++"',
            ]
        return "\n".join(
            [
                *lines,
                " ".join(["python -m pip install --force-reinstall", *_PIP]),
                f"python -m pip install numpy horovod=={VERSION}",
            ]
        )


#: Variables that horovodrun sets in its processes. They do not affect the build.
_OF_A_RUN = (
    r"HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_|CONTROLLER|ELASTIC|TIMELINE|STALL|LOG_|CYCLE"
    r"|FUSION|CACHE|SECRET)"
)
#: Without pip's cache, whose wheel may be built for another torch.
_PIP = [
    "--no-build-isolation",
    "--no-deps",
    "--no-cache-dir",
    "--no-binary",
    "horovod",
    f"horovod=={VERSION}",
]


def build(recipe: Recipe, cache: Path) -> Path:
    """Return the wheel from the cache, or build it, which takes minutes.

    Raises:
        InstallError: the build failed; its log is kept in the cache.
    """
    folder = cache / recipe.key
    if ready := sorted(folder.glob("*.whl")):
        print(f"Horovod's wheel was built before: {ready[0]}")
        return ready[0]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    print(
        f"building Horovod {VERSION} for torch {recipe.torch}; this takes minutes (log: {log})",
        flush=True,
    )
    # Built in the same folder and then renamed in one step, so that two builds at the same time
    # never see half a wheel.
    with (
        tempfile.TemporaryDirectory(dir=folder) as temporary,
        log.open("w", encoding="utf-8") as out,
    ):
        variables = {**recipe.environ, **recipe.variables, "PYTHONUNBUFFERED": "1"}
        if recipe.wrapper is not None:
            script = Path(temporary, "c++")
            script.write_text(recipe.wrapper, encoding="utf-8")
            script.chmod(0o755)
            variables["CXX"] = str(script)
        command = [sys.executable, "-m", "pip", "wheel", "-v", *_PIP, "--wheel-dir", temporary]
        done = subprocess.run(
            command,
            env=variables,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        made = sorted(Path(temporary).glob("horovod-*.whl"))
        if done.returncode != 0 or not made:
            raise InstallError(
                f"{_tail(log)}\nthe build of Horovod failed (exit code {done.returncode}). "
                f"The whole log: {log}. Fix: correct the first error in the log"
            )
        return Path(shutil.move(made[0], folder / made[0].name))


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN:])


def install(wheel: Path) -> None:
    """Install the wheel and its dependencies. Any other Horovod is replaced.

    Raises:
        InstallError: pip failed, or the installed Horovod cannot be used.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for arguments in (["--no-deps", "--force-reinstall", str(wheel)], [str(wheel), "numpy"]):
        done = subprocess.run([*pip, *arguments], check=False, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise InstallError(
                f"pip could not install {wheel.name} (exit code {done.returncode}). "
                "Fix: correct the error that pip prints above"
            )
    # In another process, because this one may have imported the old Horovod.
    ask = "from geartrain_horovod.installed import missing; print(missing() or '')"
    answer = subprocess.run(
        [sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if answer.returncode != 0 or answer.stdout.strip():
        reason = answer.stdout.strip() or answer.stderr.strip()
        raise InstallError(f"{wheel.name} is installed and cannot be used: {reason}")


def default_cache() -> Path:
    """Return the folder for wheels, in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or (
        Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    )
    return Path(base, "geartrain-horovod")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m geartrain_horovod.install", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--mpi", action="store_true", help="build with MPI too, for mpirun and horovodrun --mpi"
    )
    parser.add_argument(
        "--nccl", action="store_true", help="build with NCCL, for GPUs; needs nvcc and NCCL headers"
    )
    parser.add_argument(
        "--print",
        action="store_true",
        dest="show",
        help="print the steps for a build by hand, and do nothing",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=None,
        metavar="DIR",
        help=f"folder for wheels; default {default_cache()}",
    )
    options = parser.parse_args(argv)
    try:
        recipe = Recipe(options.mpi, options.nccl)
        if options.show:
            print(recipe.script())
            return 0
        install(build(recipe, (options.cache or default_cache()).absolute()))
    except InstallError as error:
        print(f"geartrain_horovod.install: {error}", file=sys.stderr)
        return 1
    print(f"Horovod {VERSION} is installed for torch {recipe.torch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
