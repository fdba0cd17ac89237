"""tests/README.md explains each marker."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARKERS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"][
    "ini_options"
]["markers"]
MARKERS = [line for line in MARKERS if not line.endswith(": becomes one of those above")]


@pytest.mark.parametrize("marker", MARKERS, ids=lambda marker: marker.partition(":")[0])
def test_the_readme_explains_each_marker(marker):
    name, _, rule = marker.partition(": ")
    assert f"- `{name}`: {rule}" in (ROOT / "tests" / "README.md").read_text(encoding="utf-8")


def test_the_default_leaves_out_every_marker():
    (line,) = [
        line
        for line in (ROOT / "tox.ini").read_text(encoding="utf-8").splitlines()
        if line.startswith("chosen = ")
    ]
    assert line.removeprefix("chosen = not ").split(" and not ") == [
        marker.partition(":")[0] for marker in MARKERS
    ]
