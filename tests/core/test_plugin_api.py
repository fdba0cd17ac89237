"""geartrain.plugin_api: type checkers see the names that plugins get."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from geartrain import plugin_api

HOME = Path(plugin_api.__file__).parent


def names():
    """Return the names that type checkers see: those that are imported as themselves."""
    trees = [
        ast.parse((HOME / file).read_text(encoding="utf-8"))
        for file in ("__init__.py", "with_torch.py")
    ]
    return {
        one.asname
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    } - {None}


def test_type_checkers_see_the_names_that_plugins_get():
    assert names() == set(dir(plugin_api))
    assert all(getattr(plugin_api, name) is not None for name in names())


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
