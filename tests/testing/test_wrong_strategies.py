"""Every wrong strategy of tests/packages/geartrain-wrong is caught, by exactly the cases that are about what is wrong in it."""

import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from geartrain.testing import StrategyConformance
from geartrain.testing.program import COMPARED

from ..sites import PACKAGES, ROOT, build, environment
from .wrong import EQUAL, WRONG

#: What a strategy's author writes, and which of the cases are wanted.
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
    chosen = {wrong.chosen!r}
"""
CONFTEST = """
import re


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if re.search(item.cls.chosen, item.name)]
"""
#: Seconds for one wrong strategy, on a machine that does other things as well.
EACH = 60

pytestmark = pytest.mark.timeout(EACH * len(WRONG))


def _class_name(name: str) -> str:
    return "Test" + "".join(word.capitalize() for word in name.replace("-", " ").replace("_", " ").split())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """An environment with the wheels of core and of the wrong strategies, and pytest."""
    wheels = build(tmp_path_factory.mktemp("wheels"), [ROOT / "core", PACKAGES / "geartrain-wrong"])
    return environment(tmp_path_factory.mktemp("site"), wheels)


@pytest.fixture(scope="module")
def outcomes(site, request, tmp_path_factory):
    """name -> (cases that were run, those that failed, their messages), of those that are asked for; all by one pytest, which runs
    the comparable one process once."""
    names = [item.callspec.params["name"] for item in request.session.items if "outcomes" in item.fixturenames]
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    classes = [CLASS.format(name=_class_name(name), wrong=WRONG[name]) for name in names]
    (folder / "test_wrong.py").write_text(SUITE.format(classes="\n".join(classes)))
    arguments = ("-q", "-p", "no:cacheprovider", "-p", "no:timeout", "--basetemp", "files", "--junitxml", "report.xml")
    done = site.run(site.python, "-m", "pytest", *arguments, cwd=folder, seconds=EACH * len(names))
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


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if WRONG[name].long else ()) for name in WRONG])
def test_is_caught_by_exactly_the_cases_about_it(outcomes, name):
    outcome, wrong = outcomes[name], WRONG[name]
    assert wrong.fails <= outcome.ran
    messages = "\n".join(f"--- {case}\n{text}" for case, text in outcome.failed.items() if case not in wrong.fails)
    assert set(outcome.failed) == wrong.fails, messages


def test_every_case_catches_something():
    caught = {case.partition("[")[0] for wrong in WRONG.values() if not wrong.long for case in wrong.fails}
    assert {name for name in dir(StrategyConformance) if name.startswith("test_")} <= caught
    assert {EQUAL(name) for name in COMPARED} <= {case for wrong in WRONG.values() if not wrong.long for case in wrong.fails}


def test_every_wrong_strategy_is_listed():
    groups = tomllib.loads((PACKAGES / "geartrain-wrong" / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {f"wrong-{wrong.strategy}" for wrong in WRONG.values()} == set(groups["geartrain.strategies"])
