"""The command that builds Horovod: its variables for the build, the kept wheel, its messages.

pip is real; the Horovod of these tests has no C++ code.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from geartrain_horovod import install, installed
from geartrain_horovod.install import InstallError, Recipe

from ..tools.sites import ROOT, build, environment

SETUP = """
import json, os, sys, time
from pathlib import Path
from setuptools import setup

print("\\n".join(f"line {i}" for i in range(100)))
if os.environ.get("TEST_FAIL"):
    sys.exit("the compiler said no")
with open(os.environ["TEST_BUILDS"], "a") as file:
    file.write(json.dumps({**os.environ, "COMMAND": sys.argv}) + "\\n")
metadata = {"pytorch": os.environ["TEST_TORCH"], "dummy": "none"}
Path("horovod/metadata.json").write_text(json.dumps(metadata))
setup(
    name="horovod",
    version="0.28.1",
    packages=["horovod", "horovod.torch"],
    package_data={"": ["*.json", "*.so"]},
)
"""
TORCH = installed.torch_version()
TORCH_PART = """
def gloo_built(): return True
def mpi_built(): return False
nccl_built = cuda_built = mpi_built
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A separate environment, and an index that contains one Horovod."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "horovod-0.28.1"
    (source / "horovod" / "torch").mkdir(parents=True)
    (source / "horovod" / "__init__.py").touch()
    (source / "horovod" / "torch" / "__init__.py").write_text(TORCH_PART)
    (source / "horovod" / "torch" / "mpi_lib_v2.so").touch()
    (source / "setup.py").write_text(SETUP)
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    made = environment(folder / "venv", build(folder, [ROOT / "plugins/strategies/horovod"]))
    made.folder, made.builds = folder, folder / "builds.jsonl"
    tools = folder / "tools"
    tools.mkdir()
    for name in ("cmake", "c++", "sh", "python3"):
        (tools / name).symlink_to(shutil.which(name) or sys.executable)
    made.tools = tools
    return made


@pytest.fixture
def command(site, tmp_path):
    """Return a function that runs the command. PATH has only the needed tools of this machine."""
    site.builds.unlink(missing_ok=True)

    def run(*arguments, cache=tmp_path / "cache", **env):
        variables = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(site.folder),
            "PATH": str(site.tools),
            "TEST_BUILDS": str(site.builds),
        }
        variables |= {
            "PIP_CACHE_DIR": str(tmp_path / "pip"),
            "PIP_CONSTRAINT": "",
            "TEST_TORCH": installed.torch_version(),
            **env,
        }
        arguments = (
            "-m",
            "geartrain_horovod.install",
            *arguments,
            *(() if cache is None else ("--cache", str(cache))),
        )
        return site.run(site.python, *arguments, cwd=tmp_path, seconds=100, **variables)

    return run


def builds(site):
    return (
        [json.loads(line) for line in site.builds.read_text().splitlines() if "bdist_wheel" in line]
        if site.builds.exists()
        else []
    )


def wheels(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.whl"))


@pytest.mark.build
def test_builds_once_installs_and_keeps_the_wheel(site, command, tmp_path):
    first = command()
    assert first.returncode == 0, first.stdout + first.stderr
    assert f"is installed for torch {installed.torch_version()}" in first.stdout
    (built,) = builds(site)
    assert (
        built["HOROVOD_WITH_PYTORCH"]
        == built["HOROVOD_WITH_GLOO"]
        == built["HOROVOD_WITHOUT_MPI"]
        == "1"
    )
    assert built["HOROVOD_WITHOUT_TENSORFLOW"] == built["HOROVOD_WITHOUT_MXNET"] == "1"
    assert built["HOROVOD_CPU_OPERATIONS"] == "GLOO"
    assert built["MAKEFLAGS"].startswith("-j")
    assert "HOROVOD_GPU_OPERATIONS" not in built
    # As CMake calls it: the launcher, the compiler, the arguments.
    launcher = built["CMAKE_CXX_COMPILER_LAUNCHER"].split(";")
    output = subprocess.run(
        [*launcher, "echo", "-std=gnu++14", "file.cc"], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ["-std=gnu++14", "file.cc", "-std=c++17"]
    python = site.run(
        site.python, "-c", "import horovod.torch; print(horovod.torch.__file__)", cwd=tmp_path
    )
    assert str(site.folder) in python.stdout, python.stderr

    again = command(TEST_FAIL="1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "was built before" in again.stdout
    assert len(builds(site)) == 1

    flags = command(HOROVOD_BUILD_ARCH_FLAGS="-mavx")
    assert flags.returncode == 0, flags.stderr
    assert len(builds(site)) == 2  # not the first wheel, which pip's cache would return
    assert len(wheels(tmp_path / "cache")) == 2
    assert not list((tmp_path / "cache").rglob("tmp*"))


@pytest.mark.build
def test_printed_steps_install_it_too(site, command, tmp_path):
    shown = command("--print", cache=None)
    assert shown.returncode == 0, shown.stderr
    assert builds(site) == []
    script = shown.stdout.replace("python -m pip", f"{site.python} -m pip")
    variables = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(site.folder),
        "TEST_BUILDS": str(site.builds),
        "PIP_CONSTRAINT": "",
    }
    variables |= {"TEST_TORCH": installed.torch_version(), "PATH": os.environ["PATH"]}
    done = site.run("sh", "-e", "-c", script, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = builds(site)
    assert built["CMAKE_CXX_COMPILER_LAUNCHER"].endswith("-std=c++17")


@pytest.mark.build
def test_failed_build_shows_its_end_and_its_log(site, command, tmp_path):
    failed = command(TEST_FAIL="1")
    assert failed.returncode == 1
    assert "the compiler said no" in failed.stderr
    assert "line 99" in failed.stderr
    assert "line 20\n" not in failed.stderr
    assert "Traceback" not in failed.stderr
    log = next((tmp_path / "cache").rglob("build.log"))
    assert str(log) in failed.stderr
    assert "line 20\n" in log.read_text()
    assert wheels(tmp_path / "cache") == []
    assert command().returncode == 0, "files of the failed build do not disturb the next"


@pytest.mark.build
def test_a_wheel_for_another_torch_is_refused(command):
    done = command(TEST_TORCH="1.13.0")
    assert done.returncode == 1
    assert (
        f"was built for torch 1.13.0, and torch {installed.torch_version()} is installed"
        in done.stderr
    )


@pytest.mark.build
@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("cmake", "cmake was not found. Fix: pip install cmake"),
        ("c++", "no C++ compiler was found (c++, g++ or clang++). Fix: "),
    ],
)
def test_missing_tool_is_named_before_anything_is_built(site, command, tmp_path, tool, words):
    tools = tmp_path / "tools"
    shutil.copytree(site.tools, tools, symlinks=True)
    (tools / tool).unlink()
    done = command(PATH=str(tools))
    assert done.returncode == 1
    assert words in done.stderr
    assert builds(site) == []


# --- the build's variables -----------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path):
    def make(mpi=False, nccl=False, cmake="3.25.1", tools=(), **environ):
        for name in ("c++", *tools):
            tool = tmp_path / name
            tool.write_text("#!/bin/sh\necho $0 $@\n")
            tool.chmod(0o755)
        (tmp_path / "cmake").write_text(f"#!/bin/sh\necho cmake version {cmake}\n")
        (tmp_path / "cmake").chmod(0o755)
        return Recipe(mpi, nccl, {"PATH": str(tmp_path), **environ})

    return make


def test_ccache_and_old_cmake_get_a_wrapper(recipe, tmp_path):
    for made in (recipe(tools=["ccache"]), recipe(cmake="3.16.2")):
        assert "CMAKE_CXX_COMPILER_LAUNCHER" not in made.variables
        script = tmp_path / "wrapper"
        script.write_text(made.wrapper)
        script.chmod(0o755)
        variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        output = subprocess.run(
            [script, "-c", "a file.cc"], capture_output=True, text=True, check=True, env=variables
        ).stdout
        assert output.split()[1:] == ["-c", "a", "file.cc", "-std=c++17"]
        assert "export CXX=" in made.script()
        (tmp_path / "ccache").unlink(missing_ok=True)


def test_new_cmake_gets_the_policy_for_old_projects(recipe):
    assert recipe(cmake="4.1.0").variables["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert "CMAKE_POLICY_VERSION_MINIMUM" not in recipe(cmake="3.31.0").variables


def test_a_setuptools_that_makes_no_wheel_is_refused(recipe, monkeypatch):
    monkeypatch.setattr(install, "version", lambda name: "65.5.0")
    monkeypatch.setattr(install, "find_spec", lambda name: name != "wheel" or None)
    with pytest.raises(InstallError, match=r"65\.5\.0 cannot make a wheel\. Fix: pip install"):
        recipe()
    monkeypatch.setattr(install, "find_spec", lambda name: True)
    assert recipe().variables  # the package wheel makes it


def test_mpi_and_nccl(recipe):
    made = recipe(mpi=True, tools=["mpicxx"])
    assert made.variables["HOROVOD_WITH_MPI"] == "1"
    assert not {"HOROVOD_WITHOUT_MPI", "HOROVOD_CPU_OPERATIONS"} & made.variables.keys()
    assert made.variables["CMAKE_CXX_COMPILER_LAUNCHER"].endswith("-std=c++20")
    assert recipe(nccl=True, tools=["nvcc"]).variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_missing_tools_of_mpi_and_nccl_are_named(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("geartrain_horovod.install._CUDA", str(tmp_path / "cuda"))
    with pytest.raises(
        InstallError,
        match=r"mpicxx was not found\. Fix: apt-get install openmpi-bin libopenmpi-dev",
    ):
        recipe(mpi=True)
    with pytest.raises(InstallError, match=r"nvcc was not found\. Fix: "):
        recipe(nccl=True)
    with pytest.raises(InstallError, match=r"older than 3\.13"):
        recipe(cmake="3.5.0")


@pytest.fixture
def cuda_torch(tmp_path, monkeypatch):
    """The torch that ``pip install torch`` installs on Linux, without a CUDA toolkit."""
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text(
        "__version__ = '2.13.0+cu130'\ndebug = False\n"
        "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    monkeypatch.setattr(installed, "_folder", lambda name: folder)
    monkeypatch.setattr("geartrain_horovod.install._CUDA", str(tmp_path / "cuda"))


@pytest.mark.usefixtures("cuda_torch")
def test_a_cuda_build_of_torch_without_the_toolkit_is_refused_before_the_build(recipe, tmp_path):
    message = (
        r"torch 2\.13\.0\+cu130 is built for CUDA 13\.0, and .* needs the CUDA toolkit: "
        r"nvcc was not found\. Fix: pip install --force-reinstall torch==2\.13\.0 "
        r"--index-url https://download\.pytorch\.org/whl/cpu .* HOROVOD_CUDA_HOME$"
    )
    with pytest.raises(InstallError, match=message):
        recipe()
    assert recipe(tools=["nvcc"]).torch == "2.13.0+cu130"
    (tmp_path / "nvcc").unlink()
    for variable in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", None):
        home = tmp_path / (variable or "cuda")
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "nvcc").write_text("#!/bin/sh\n")
        (home / "bin" / "nvcc").chmod(0o755)
        recipe(**({} if variable is None else {variable: str(home)}))


def test_a_build_of_torch_for_the_cpu_needs_no_toolkit(tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text(
        "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
    )
    monkeypatch.setattr(installed, "_folder", lambda name: tmp_path)
    assert installed.torch_version() == "2.13.0+cpu"
    assert installed.torch_cuda() is None


def test_variables_that_the_user_has_set_are_kept(recipe):
    made = recipe(MAKEFLAGS="-j1", HOROVOD_CPU_OPERATIONS="CCL")
    assert made.variables["MAKEFLAGS"] == "-j1"
    assert made.variables["HOROVOD_CPU_OPERATIONS"] == "CCL"


def test_the_key_of_a_wheel_contains_everything_it_depends_on(recipe, monkeypatch):
    keys = [
        recipe().key,
        recipe(mpi=True, tools=["mpicxx"]).key,
        recipe(nccl=True, tools=["nvcc"]).key,
    ]
    keys += [
        recipe(HOROVOD_BUILD_ARCH_FLAGS="-mavx").key,
        recipe(HOROVOD_BUILD_ARCH_FLAGS="-mavx2").key,
        recipe(CXXFLAGS="-O1").key,
    ]
    monkeypatch.setattr("geartrain_horovod.install.torch_version", lambda: "2.99.0+cu140")
    keys.append(recipe().key)
    assert len(set(keys)) == len(keys)
    assert "torch-2.99.0+cu140" in keys[-1]
    # The variables that horovodrun sets in a rank do not change the key.
    assert recipe(HOROVOD_RANK="1", HOROVOD_GLOO_IFACE="lo").key == keys[-1]


# --- what is missing -----------------------------------------------------------------------------


_BLOCK = """import importlib.util as u
find = u.find_spec
u.find_spec = lambda name, *more: None if name == {0!r} else find(name, *more)
"""
_OF = {"built": TORCH, "extension": True, "part": TORCH_PART}
#: By case: the parts of a Horovod, code that runs before ``missing()``, and words of its answer.
#: The Horovod's folder is the first in ``sys.path``.
MISSING = {
    "usable": (_OF, "", "None\n"),
    "another torch": ({**_OF, "built": "1.13.1"}, "", "was built for torch 1.13.1, and torch "),
    "no torch": ({**_OF, "built": None}, "", "was built for torch None"),
    "no extension": ({**_OF, "extension": False}, "", "is installed without its part for torch"),
    "not loadable": (
        {**_OF, "part": "raise ImportError('undefined symbol: _ZN5torch')"},
        "",
        "cannot be loaded: ImportError: undefined symbol: _ZN5torch",
    ),
    "neither Gloo nor MPI": (
        {**_OF, "part": TORCH_PART.replace("True", "False")},
        "",
        "was built without Gloo and MPI",
    ),
    # Horovod is not imported if its files are wrong.
    "wrong files": (
        {**_OF, "built": "1.13.1", "part": "raise SystemExit('imported')"},
        "",
        "was built for torch 1.13.1",
    ),
    "none": (
        None,
        _BLOCK.format("horovod"),
        "Horovod is not installed. Fix: python -m geartrain_horovod.install (",
    ),
    "no numpy": (_OF, _BLOCK.format("numpy"), "not installed. Fix: pip install numpy"),
}
#: Each case runs in a forked process, because importing torch takes seconds.
_ASK = """
import json, os, sys
import torch

for folder, before in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        sys.path.insert(0, folder)
        exec(before)
        from geartrain_horovod.installed import missing
        with open(os.path.join(folder, "answer"), "w") as file:
            print(missing(), file=file)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return the answer of ``missing()`` in each case."""
    cases = []
    for made, before, _ in MISSING.values():
        folder = tmp_path_factory.mktemp("missing")
        cases.append((str(folder), before))
        if made is None:
            continue
        package = folder / "horovod" / "torch"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(made["part"])
        if made["extension"]:
            (package / "mpi_lib_v2.so").touch()
        if made["built"] is not None:
            (package.parent / "metadata.json").write_text(json.dumps({"pytorch": made["built"]}))
    done = subprocess.run(
        [sys.executable, "-c", _ASK, json.dumps(cases)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return dict(
        zip(MISSING, ((Path(folder) / "answer").read_text() for folder, _ in cases), strict=True)
    )


@pytest.mark.parametrize("case", MISSING)
def test_missing_returns_the_reason(answers, case):
    words = MISSING[case][2]
    assert words in answers[case]
    assert answers[case] == "None\n" or "Fix: " in answers[case]
    if "numpy" not in case and case != "usable":
        assert "Fix: python -m geartrain_horovod.install (" in answers[case]
