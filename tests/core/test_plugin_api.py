"""geartrain.plugin_api: what type checkers see is what plugins get."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from geartrain import plugin_api

NAMES = {name: module for module, names in plugin_api._NAMES.items() for name in names.split()}


def test_type_checkers_see_the_names_that_plugins_get():
    tree = ast.parse(Path(plugin_api.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("geartrain")]
    assert {one.asname: node.module for node in imports for one in node.names} == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name):
    assert getattr(plugin_api, name) is not None


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'Registri'"):
        _ = plugin_api.Registri


def test_what_reads_metadata_alone_imports_no_torch():
    code = "import sys; from geartrain.plugin_api import Registry, nearest, user_path; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
