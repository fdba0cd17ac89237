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


@pytest.mark.parametrize("name", NAMES)
def test_docstring_has_summary_time_arguments_and_result_as_the_signature_has(name):
    parameters = inspect.signature(getattr(hookspecs, name)).parameters.values()
    assert docstring(name).splitlines()[0].endswith(".")
    assert section(name, "Fired")
    described = section(name, "Arguments")
    arguments = [p.name for p in parameters if p.name != "run"]
    assert [p for p in arguments if f"``{p}``" not in described] == []
    assert bool(described) == bool(arguments)
    returns = inspect.get_annotations(getattr(hookspecs, name))["return"]
    assert bool(section(name, "Returns")) == (returns != "None")
    assert all(
        p.annotation is not p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
        for p in parameters
    )


@pytest.mark.parametrize("name", NAMES)
def test_single_hooks_and_no_others_have_a_default(name):
    assert bool(section(name, "Default")) == HOOKS.is_single(name)
    assert hasattr(Defaults, name) == HOOKS.is_single(name)


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
