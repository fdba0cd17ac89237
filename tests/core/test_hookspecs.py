"""Every hook is documented, has a default if it needs one, is tested, and is in docs/hooks.md."""

import inspect
import re
from pathlib import Path

import pytest

from geartrain import hookspecs
from geartrain.builtin.defaults import Defaults
from geartrain.hooks.manager import Hooks

HERE = Path(__file__)
TESTS = HERE.parents[1]
DOCS = TESTS.parent / "docs" / "hooks.md"

HOOKS = Hooks([])
NAMES = HOOKS.names
SINGLE = [name for name in NAMES if HOOKS.is_single(name)]
EVERY = [name for name in NAMES if not HOOKS.is_single(name)]


def docstring(name):
    return inspect.getdoc(getattr(hookspecs, name)) or ""


def section(name, title):
    """Return the text after ``Fired:``, ``Arguments:``, ``Returns:`` or ``Default:``."""
    match = re.search(
        rf"^{title}: (.*?)(?=^(?:Fired|Arguments|Returns|Default): |\Z)",
        docstring(name),
        re.MULTILINE | re.DOTALL,
    )
    return match[1].strip() if match else ""


def test_all_hooks_of_the_design_exist():
    assert len(NAMES) == len(SINGLE) + len(EVERY)
    assert {
        "plan_processes",
        "launch",
        "step",
        "forward",
        "reduce_gradients",
        "teardown_device",
    } <= set(SINGLE)
    assert {"check_plan", "device_stats", "log_metrics", "on_step_end", "on_exception"} <= set(
        EVERY
    )


@pytest.mark.parametrize("name", NAMES)
def test_docstring_has_a_summary_and_the_time_of_the_call(name):
    summary = docstring(name).splitlines()[0]
    assert summary.endswith(".")
    assert section(name, "Fired")


@pytest.mark.parametrize("name", NAMES)
def test_docstring_describes_every_argument_but_run(name):
    described = section(name, "Arguments")
    arguments = [p for p in inspect.signature(getattr(hookspecs, name)).parameters if p != "run"]
    assert [p for p in arguments if f"``{p}``" not in described] == []
    assert bool(described) == bool(arguments)


@pytest.mark.parametrize("name", NAMES)
def test_docstring_describes_the_result_if_there_is_one(name):
    returns = inspect.get_annotations(getattr(hookspecs, name))["return"]
    assert bool(section(name, "Returns")) == (returns != "None")


@pytest.mark.parametrize("name", NAMES)
def test_arguments_and_results_have_types(name):
    parameters = inspect.signature(getattr(hookspecs, name)).parameters.values()
    assert all(
        p.annotation is not p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
        for p in parameters
    )


@pytest.mark.parametrize("name", SINGLE)
def test_single_hook_documents_its_default_and_has_one(name):
    assert section(name, "Default")
    assert hasattr(inspect.getattr_static(Defaults, name, None), "geartrain_impl") or hasattr(
        getattr(Defaults, name), "geartrain_impl"
    )


@pytest.mark.parametrize("name", EVERY)
def test_all_hook_has_no_default(name):
    assert not section(name, "Default")
    assert not hasattr(Defaults, name)


def test_every_hook_is_tested():
    source = "\n".join(path.read_text() for path in TESTS.rglob("*.py") if path != HERE)
    untested = [name for name in NAMES if not re.search(rf"def {name}\(|hooks\.{name}\b", source)]
    assert untested == []


def test_every_hook_has_an_entry_in_the_docs():
    text = DOCS.read_text() if DOCS.exists() else ""
    missing = [
        name for name in NAMES if not re.search(rf"^(?:#+|\||[-*]) *`*{name}\b", text, re.MULTILINE)
    ]
    assert missing == [], f"docs/hooks.md lacks {', '.join(missing)}"
