"""Fixtures for tests of commands: a folder with a target, and the command line in this process.

A new process would import torch, which takes two seconds. A conftest imports the fixtures that its
folder uses.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import geartrain.planning.registry
from geartrain.commands import main

TARGETS = Path(__file__).parent / "targets"


def distribution_of(entry_point):
    """Return the name of its distribution. ``dist.name`` would parse METADATA, in milliseconds."""
    return entry_point.dist._normalized_name.replace("_", "-")


def cells(printed, first):
    """Return the cells of the row that starts with ``first``, and of the lines below it."""
    lines = printed.splitlines()
    begin = next(i for i, line in enumerate(lines) if re.match(f"  {re.escape(first)}(  |$)", line))
    end = next(
        (i for i in range(begin + 1, len(lines)) if not lines[i].startswith("   ")), len(lines)
    )
    return [cell for line in lines[begin:end] for cell in re.split(r"\s{2,}", line.strip())]


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def facts(self):
        """The facts that ``--json`` printed."""
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with ``net.py`` and ``my_hooks.py``.

    Modules that a command imports from it are removed from ``sys.modules`` afterwards.
    """
    for name in ("net.py", "my_hooks.py"):
        shutil.copy(TARGETS / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("COLUMNS", "200")  # so that tables are not wrapped
    monkeypatch.delenv("GEARTRAIN_BLOCK", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and tmp_path in Path(file).resolve().parents:
            del sys.modules[name]


@pytest.fixture
def installed(monkeypatch):
    """Names of the distributions that exist for a test: only core and the tools.

    Tests add others with ``install``.
    """
    tools = ("callbacks", "cli", "port", "testing", "tools")
    names = {"geartrain", *(f"geartrain-{tool}" for tool in tools)}
    real = geartrain.planning.registry.entry_points
    monkeypatch.setattr(
        geartrain.planning.registry,
        "entry_points",
        lambda **wanted: [ep for ep in real(**wanted) if distribution_of(ep) in names],
    )
    return names


@pytest.fixture
def install(folder, installed, monkeypatch):
    """``install("geartrain-chip", source, accelerators={"chip": "Chip"})``: add a distribution."""

    def add(distribution, source, **groups):
        module, home = distribution.replace("-", "_"), folder / "site" / distribution
        info = home / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        lines = [
            line
            for group, names in groups.items()
            for line in (
                f"[geartrain.{group}]",
                *(f"{name} = {module}:{cls}" for name, cls in names.items()),
            )
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        (home / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(home)
        installed.add(distribution)

    return add


@pytest.fixture
def chip(install):
    """Install ``geartrain-chip``: accelerator, strategy, two plugins; see geartrain_chip.py."""
    bells = dict.fromkeys(["bell", "door-bell"], "Bell")
    source = (TARGETS / "geartrain_chip.py").read_text()
    install(
        "geartrain-chip",
        source,
        accelerators={"chip": "Chip"},
        strategies={"scaled": "Scaled"},
        plugins=bells,
    )


@pytest.fixture
def write(folder):
    """``write("conf.yaml", text)``: write a file in the working directory."""

    def write(name, text):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


@pytest.fixture
def command(folder, installed, capsys):
    """``command("fit net.py --max-epochs 1")``: run a command line; return its code and output."""

    def run(line):
        capsys.readouterr()
        try:
            code = main(shlex.split(line))
        except SystemExit as end:  # --help and --print-config
            code = end.code or 0
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def plan(command):
    """``plan("--max-epochs 2")``: return the facts of ``explain --json`` with these options."""
    return lambda options="": command(f"explain net.py --json {options}").facts


@pytest.fixture
def fit(command):
    """``fit("--seed 1")``: train ``net.py`` for an epoch of four steps; return the output."""

    def run(options="", target="net.py"):
        done = command(f"fit {target} --enable-progress-bar false --max-epochs 1 {options}")
        assert done.code == 0, done.err
        return done.out

    return run


@pytest.fixture
def refused(command, folder):
    """``refused("fit net.py --gpus 2")``: return the message of a wrong command line."""

    def run(line):
        done = command(line)
        assert done.code == 2, done
        assert "Traceback" not in done.err
        assert done.err.startswith(f"geartrain {line.split()[0]}: ")
        assert "the module is made" not in done.out
        assert "the data is made" not in done.out
        return done.err

    return run


@pytest.fixture
def python(folder):
    """``python("train.py", "--seed", "1")``: run Python and return the finished process."""

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    return run
