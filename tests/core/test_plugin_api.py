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


@pytest.mark.parametrize("name", sorted(names()))
def test_every_name_exists(name):
    assert getattr(plugin_api, name) is not None


def test_no_bar_is_imported_with_the_other_names():
    code = "import sys; from geartrain.plugin_api import map_tensors; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'Registri'"):
        _ = plugin_api.Registri


def test_names_that_read_only_metadata_import_no_torch():
    code = (
        "import sys; from geartrain.plugin_api import Registry, nearest, user_path; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
