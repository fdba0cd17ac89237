"""The registry and `geartrain plugins` never import torch.

The tox environment `discovery` has no torch.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

without_torch = pytest.mark.skipif(
    os.environ.get("GEARTRAIN_TEST_WITHOUT_TORCH") != "1",
    reason="needs an environment without torch: tox run -e discovery",
)


def python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )


def command(*arguments):
    return python(
        "import sys; from geartrain.commands import main; sys.exit(main(sys.argv[1:]))", *arguments
    )


@without_torch
def test_this_environment_has_no_torch():
    assert importlib.util.find_spec("torch") is None


def test_listing_plugins_works():
    result = command("plugins", "--json")
    assert result.returncode == 0, result.stderr
    rows = {(row["kind"], row["name"]): row for row in json.loads(result.stdout)}
    assert (
        rows["accelerator", "cpu"]["distribution"]
        == rows["strategy", "single"]["distribution"]
        == "geartrain"
    )
    assert rows["accelerator", "cpu"]["state"] == "installed"


def test_torch_is_not_imported():
    """One program, which prints each statement that imports torch."""
    statements = (
        "import geartrain",
        "import geartrain.planning.registry; geartrain.planning.registry.Registry()",
        "import geartrain.planning.devices",
        "import geartrain.hookspecs",
        "import geartrain.loop.run",
        "from geartrain.commands import main; main(['plugins'])",
        "from geartrain.commands import main; main(['--help'])",
    )
    program = "import contextlib, io, sys\nfor statement in sys.argv[1:]:\n"
    program += "    with contextlib.redirect_stdout(io.StringIO()):\n        exec(statement)\n"
    program += "    if sys.modules.pop('torch', None): print(statement)"
    result = python(program, *statements)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_a_package_is_written(tmp_path):
    result = command("new", "strategy", "tandem", "--output", str(tmp_path / "package"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "package" / "src" / "geartrain_tandem" / "__init__.py").exists()


def test_an_unknown_name_is_answered_without_torch():
    result = python(
        "from geartrain.planning.registry import Registry; Registry().find('strategy', 'sinlge')"
    )
    assert "Did you mean 'single'?" in result.stderr


@without_torch
def test_training_without_torch_reports_that_torch_is_missing(tmp_path):
    result = command("fit", "model.py")
    assert result.returncode == 2
    assert "torch is not installed" in result.stderr
    assert "Traceback" not in result.stderr
