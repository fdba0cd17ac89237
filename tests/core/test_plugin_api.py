"""geartrain.plugin_api: its list of names is the one that plugins and type checkers see."""

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from geartrain import plugin_api
from geartrain.plugin_api import with_torch

ROOT = Path(__file__).parents[2]
LISTED = ROOT / "tests" / "surface.json"
#: Names with one user, and no other way: Session is a second Trainer; geartrain.parallel adds the
#: cases of several ranks to core's handling of signals, which a run in one process needs too; fast
#: steps as core does, and DDP imports torch's compiler as the first optimizer does.
SINGLE_USER = {"TrainerBase", "raise_on_signals"}
SINGLE_USER |= {"step_optimizer", "plain_step", "put_off_compiler"}


@pytest.fixture(scope="module")
def importers():
    """Return name of plugin_api -> the distributions that import it."""
    found = {name: set() for name in plugin_api.__all__}
    for path in ROOT.glob("plugins/*/*/src/**/*.py"):
        distribution = path.relative_to(ROOT).parts[2]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "geartrain.plugin_api":
                for name in node.names:
                    found[name.name].add(distribution)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "plugin_api":
                found[node.attr].add(distribution)
    return found


def test_a_name_has_two_users_or_a_page_for_authors(importers):
    linked = set()
    for page in ROOT.glob("docs/write-a*.md"):
        linked.update(re.findall(r"plugin-api\.md#(\w+)", page.read_text(encoding="utf-8")))
    hooks = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    single = [name for name, users in importers.items() if len(users) < 2]
    single = [name for name in single if not re.search(rf"\b{name}\b", hooks)]
    assert {name for name in single if name.lower() not in linked} == SINGLE_USER


@pytest.mark.parametrize("name", plugin_api.__all__)
def test_each_name_can_be_imported_and_says_its_purpose(name):
    value = getattr(plugin_api, name)
    if inspect.isclass(value):
        assert vars(value)["__doc__"]  # a class without a docstring inherits another's
    elif inspect.isroutine(value) or inspect.ismodule(value):
        assert value.__doc__


def test_the_names_are_those_that_are_listed():
    listed = json.loads(LISTED.read_text(encoding="utf-8"))["names of geartrain.plugin_api"]
    assert sorted(plugin_api.__all__) == dir(plugin_api) == listed


def test_type_checkers_see_the_names_that_plugins_get():
    trees = [
        ast.parse(Path(m.__file__).read_text(encoding="utf-8")) for m in (plugin_api, with_torch)
    ]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = [node for node in found if (node.module or "").startswith("geartrain")]
    imported = {name.asname or name.name for node in found for name in node.names} - {"*"}
    assert imported == set(plugin_api.__all__)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'Registri'"):
        _ = plugin_api.Registri


@pytest.mark.parametrize(
    ("names", "module"),
    [
        ("map_tensors", "rich"),
        ("Registry, nearest, user_path", "torch"),  # these read only metadata
    ],
)
def test_a_name_imports_no_more_than_it_needs(names, module):
    code = f"import sys; from geartrain.plugin_api import {names}; print({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
