"""Wheels, built and installed in a separate environment."""

import functools
import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distributions
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder
from warm import AVAILABLE, Warm

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "tests" / "packages"


class Site:
    """A Python environment with the wheels installed."""

    def __init__(self, folder):
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        self._folder = folder

    @functools.cached_property
    def _warm(self):
        return Warm(self.python, self._folder, variables())

    @functools.cached_property
    def warm_python(self):
        """A python that runs each file in a new process with torch already imported."""
        return self._warm.script(self.bin / "warm_python") if AVAILABLE else self.python

    @functools.cached_property
    def _warm_geartrain(self):
        return (
            self._warm.script(self.bin / "warm_geartrain", self.bin / "geartrain")
            if AVAILABLE
            else self.bin / "geartrain"
        )

    def run(self, *command, cwd, seconds=60, **env):
        """Run a command in the environment; return the finished process and its output."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env={**variables(), "COLUMNS": "200", **env},
            capture_output=True,
            text=True,
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )

    def geartrain(self, *arguments, cwd, **env):
        """Run the ``geartrain`` command in a new process with torch already imported."""
        return self.run(self._warm_geartrain, *arguments, cwd=cwd, **env)


def variables():
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GEARTRAIN_", "PYTHON", "COV_"))
    }


def build(folder, sources):
    """Build the wheels of source trees in this process; pip would take seconds for each."""
    return [
        Path(wheel)
        for source in sources
        for wheel in WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    ]


def environment(folder, wheels):
    """Create an environment with these wheels. wheels.py tests their installation by pip."""
    _call(sys.executable, "-m", "venv", "--without-pip", folder)
    site = Site(folder)
    there = Path(
        _call(site.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    # Requirements of the wheels (torch above all) come from the environment of the tests, because
    # installing them again would take a network and minutes. addsitedir also reads the .pth files
    # of editable installs. The wheels come first on sys.path.
    here = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in here]
    (there / "where_the_tests_run.pth").write_text("".join(lines), encoding="utf-8")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(there)
    for installed in distributions(path=[str(there)]):
        for script in installed.entry_points.select(group="console_scripts"):
            path = site.bin / script.name
            path.write_text(
                f"#!{site.python}\nimport sys\nfrom {script.module} import {script.attr}\n"
                f"sys.exit({script.attr}())\n"
            )
            path.chmod(0o755)
    return site


def _call(*command):
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
