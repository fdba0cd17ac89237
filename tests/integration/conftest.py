"""Wheels of tests/packages/* and of core, built and installed for real, once a session."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGET = Path(__file__).with_name("downhill.py")


class Site:
    """A Python environment in which the wheels are installed."""

    def __init__(self, folder):
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"

    def run(self, *command, cwd, **env):
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
            timeout=60,
        )

    def geartrain(self, *arguments, cwd, **env):
        """Run the ``geartrain`` command that pip made there."""
        return self.run(self.bin / "geartrain", *arguments, cwd=cwd, **env)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """A wheel of core and of each of tests/packages/*, built by the ``hatchling`` that is installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT / "core", *sorted(path.parent for path in (ROOT / "tests" / "packages").glob("*/pyproject.toml"))]
    return build(folder, sources)


@pytest.fixture(scope="session")
def site(wheels, tmp_path_factory):
    """A fresh environment with all of the wheels."""
    return environment(tmp_path_factory.mktemp("site"), wheels)


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


@pytest.fixture
def geartrain(site, tmp_path):
    """``geartrain("plugins")``: run the command in a folder of the test's own."""

    def run(*arguments, **env):
        return site.geartrain(*arguments, cwd=tmp_path, **env)

    return run


@pytest.fixture
def fit(geartrain, tmp_path):
    """``fit("--strategy", "polite")``: train :mod:`downhill` for one epoch, its four steps; what the run left behind."""

    def run(*arguments, **env):
        done = geartrain("fit", TARGET, "--max-epochs", "1", "--output", "out", *arguments, **env)
        assert done.returncode == 0, done.stderr
        return Outcome(tmp_path / "out", done.stdout + done.stderr)

    return run


@pytest.fixture
def refused(geartrain, tmp_path):
    """``refused("--strategy", "broken_import")``: the one error of a run that was refused before anything was started."""

    def run(*arguments, **env):
        done = geartrain("fit", TARGET, "--max-epochs", "1", "--output", "out", *arguments, **env)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("geartrain fit: ") == 1
        assert "the module is made" not in done.stdout
        assert not (tmp_path / "out").exists()
        return done.stderr

    return run


class Outcome:
    """What a run printed and left in its folder."""

    def __init__(self, folder, printed):
        self.printed = printed
        self._folder = folder

    @property
    def weights(self):
        import torch

        return torch.load(self._folder / "last.ckpt", weights_only=True)["model"]["w"].tolist()

    @property
    def plan(self):
        return json.loads((self._folder / "plan.json").read_text())

    @property
    def metrics(self):
        """The last line of metrics.jsonl."""
        return json.loads((self._folder / "metrics.jsonl").read_text().splitlines()[-1])


def _pip(*arguments):
    # --no-index: everything that is asked for is on this machine, and nothing is ever fetched.
    _call(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, "--no-deps", "--no-index")


def _call(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
