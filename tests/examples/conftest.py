"""Run the examples with small data, as programs and as modules."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm import AVAILABLE, Warm

ROOT = Path(__file__).parents[2]

#: One thread, so that two ranks do not compete for two cores. No access to a model hub.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Ran:
    """A finished example."""

    code: int
    printed: str
    errors: str
    output: Path

    def metrics(self) -> dict[str, float]:
        """Return the last value of each metric."""
        assert self.code == 0, self.errors
        return json.loads((self.output / "summary.json").read_text())["metrics"]

    def flushed(self, name: str) -> list[float]:
        """Return every logged value of a metric."""
        lines = map(json.loads, (self.output / "metrics.jsonl").read_text().splitlines())
        return [line[name] for line in lines if name in line]


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """A python that runs each file in a new process with torch already imported."""
    if not AVAILABLE:
        return sys.executable
    folder = tmp_path_factory.mktemp("warm")
    return Warm(sys.executable, folder, os.environ | ENVIRONMENT).script(folder / "python")


@pytest.fixture
def example(python, tmp_path_factory):
    """Return a function that runs an example: ``example("digits", "--max-epochs", 1)``.

    It runs examples/digits.py as a script, or with ``geartrain fit`` if ``cli=True``. It adds
    ``--output`` with a new folder; ``option`` is the name of that option, ``None`` for a script
    that has none.
    """

    def run(
        name: str, *arguments: object, cli: bool = False, option: str | None = "--output"
    ) -> Ran:
        program = [str(Path(sys.executable).with_name("geartrain")), "fit"] if cli else []
        output = tmp_path_factory.mktemp(name) / "run"
        command = [
            python,
            *program,
            f"examples/{name}.py",
            *map(str, arguments),
            *([option, str(output)] if option is not None else []),
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=220,
        )
        return Ran(done.returncode, done.stdout, done.stderr, output)

    return run


@pytest.fixture
def report(python):
    """Return a function that writes ``geartrain report`` on a finished example, and returns it."""

    def write(ran: Ran) -> str:
        assert ran.code == 0, ran.errors
        program = str(Path(sys.executable).with_name("geartrain"))
        done = subprocess.run(
            [python, program, "report", str(ran.output)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return (ran.output / "report.html").read_text(encoding="utf-8")

    return write


def load(name: str):
    """Import an example as a module."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # as for a script
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def part():
    """Return a function: ``part("char_lm")`` imports that example as a module."""
    return load
