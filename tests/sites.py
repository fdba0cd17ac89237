"""Wheels built and installed for real, in an environment of their own."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "tests" / "packages"


class Site:
    """A Python environment in which the wheels are installed."""

    def __init__(self, folder):
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"

    def run(self, *command, cwd, seconds=60, **env):
        """Run a command there; the finished process, with what it printed."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GEARTRAIN_", "PYTHON", "COV_"))}
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env={**kept, "COLUMNS": "200", **env},
            capture_output=True,
            text=True,
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )

    def geartrain(self, *arguments, cwd, **env):
        """Run the ``geartrain`` command that pip made there."""
        return self.run(self.bin / "geartrain", *arguments, cwd=cwd, **env)


def build(folder, sources):
    """A wheel of each source tree, in ``folder``."""
    _pip("wheel", "--no-build-isolation", "--wheel-dir", folder, *sources)
    built = sorted(folder.glob("*.whl"))
    assert len(built) == len(sources)
    return built


def environment(folder, wheels):
    """A fresh environment in ``folder`` with these wheels."""
    _call(sys.executable, "-m", "venv", "--without-pip", folder)
    site = Site(folder)
    # What the wheels need (torch above all) is taken from the environment that runs the tests: to install it again would take
    # a network and minutes. addsitedir, and not the bare path, because it reads the .pth files of editable installs there too;
    # what is installed here comes first on sys.path.
    here = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    there = _call(site.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in here]
    Path(there, "where_the_tests_run.pth").write_text("".join(lines), encoding="utf-8")
    # --ignore-installed: core may be installed where the tests run, and pip would take it for this one.
    _pip("--python", site.python, "install", "--ignore-installed", *wheels)
    return site


def _pip(*arguments):
    # --no-index: everything that is asked for is on this machine, and nothing is ever fetched.
    _call(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, "--no-deps", "--no-index")


def _call(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
