"""Wrong strategies of tests/packages/geartrain-wrong: exactly the cases about their fault fail."""

import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from geartrain.testing import StrategyConformance
from geartrain_testing.program import COMPARED

from ..tools.sites import PACKAGES
from .wrong import EQUAL, each

WRONG = {name: wrong for name, wrong, _ in each()}
BY_DEFAULT = {name for name, _, is_default in each() if is_default}

PACKAGE = PACKAGES / "geartrain-wrong"
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
STRATEGIES = PROJECT["entry-points"]["geartrain.strategies"]
#: A strategy author's test file, with the cases to run.
SUITE = """
from geartrain.testing import Capabilities, StrategyConformance
{classes}
"""
CLASS = """
class {name}(StrategyConformance):
    strategy = "wrong-{wrong.strategy}"
    options = {wrong.options!r}
    capabilities = Capabilities(**{wrong.capabilities!r})
    deadline = {wrong.deadline}
    timeout = {wrong.timeout}
    program = {wrong.program!r}
    chosen = {wrong.chosen!r}
"""
CONFTEST = """
import re


def pytest_collection_modifyitems(items):
    items[:] = [
        item
        for item in items
        if re.search(item.cls.chosen, item.name)
        and ("three" in item.cls.chosen or "three" not in item.name)
    ]
"""
#: Seconds for one wrong strategy on a busy machine.
EACH = 60

pytestmark = pytest.mark.timeout(EACH * len(WRONG))


def _class_name(name: str) -> str:
    return "Test" + "".join(word.capitalize() for word in re.sub(r"\W|_", " ", name).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder for PYTHONPATH with the wrong strategies, as pip installs them, but faster."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "geartrain_wrong").symlink_to(
        PACKAGE / "src" / "geartrain_wrong", target_is_directory=True
    )
    info = folder / f"geartrain_wrong-{PROJECT['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n"
    )
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    lines = [f"{name} = {target}" for name, target in STRATEGIES.items()]
    (info / "entry_points.txt").write_text("\n".join(["[geartrain.strategies]", *lines, ""]))
    return folder


@pytest.fixture(scope="module")
def outcomes(site, request, tmp_path_factory):
    """Name -> the cases that ran, and those that failed with their messages.

    One pytest runs all chosen strategies, so that the reference in one process runs once.
    """
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if "outcomes" in item.fixturenames
    ]
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    classes = [CLASS.format(name=_class_name(name), wrong=WRONG[name]) for name in names]
    (folder / "test_wrong.py").write_text(SUITE.format(classes="\n".join(classes)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:timeout"]
    command += ["--basetemp", "files"]
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GEARTRAIN_", "PYTEST_"))
    }
    done = subprocess.run(
        [*command, "--junitxml", "report.xml"],
        cwd=folder,
        env={**environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        timeout=EACH * len(names),
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {name: SimpleNamespace(ran=set(), failed={}) for name in names}
    by_class = {_class_name(name): found[name] for name in names}
    for case in ET.parse(folder / "report.xml").iter("testcase"):
        outcome = by_class[case.get("classname").rpartition(".")[2]]
        outcome.ran.add(case.get("name"))
        for problem in (*case.findall("failure"), *case.findall("error")):
            outcome.failed[case.get("name")] = problem.text or problem.get("message")
    for path in Path("/dev/shm").glob("geartrain-wrong-*"):
        path.unlink()
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.matrix) for name in WRONG],
)
def test_is_caught_by_exactly_the_cases_about_it(outcomes, name):
    outcome, wrong = outcomes[name], WRONG[name]
    assert set(wrong.fails) <= outcome.ran
    messages = "\n".join(
        f"--- {case}\n{text}" for case, text in outcome.failed.items() if case not in wrong.fails
    )
    assert set(outcome.failed) == set(wrong.fails), messages
    for case, words in wrong.fails.items():
        # The assertion's message, without the source that pytest shows above it.
        said = "\n".join(
            line[1:].strip() for line in outcome.failed[case].splitlines() if line.startswith("E ")
        )
        assert re.search(words, said), outcome.failed[case]


def test_every_case_catches_something():
    caught = {case for wrong in WRONG.values() for case in wrong.fails}
    cases = {name for name in dir(StrategyConformance) if name.startswith("test_")}
    assert cases == {case.partition("[")[0] for case in caught}
    assert {EQUAL(name) for name in COMPARED} <= caught


def test_every_wrong_strategy_is_listed():
    assert {f"wrong-{wrong.strategy}" for wrong in WRONG.values()} == set(STRATEGIES)
