"""README.md shows the distributions that exist."""

import re
import tomllib
from pathlib import Path

import pytest

from geartrain.errors.known import DISTRIBUTIONS

ROOT = Path(__file__).parents[2]
PROJECTS = {
    project["name"]: project
    for path in [ROOT / "core" / "pyproject.toml", *ROOT.glob("plugins/*/*/pyproject.toml")]
    for project in [tomllib.loads(path.read_text(encoding="utf-8"))["project"]]
}
#: The rows of README's table: distribution -> the other cells.
ROWS = dict(
    re.findall(
        r"^\| `(geartrain[a-z-]*)` \| (.*) \|$",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)


def test_every_distribution_has_a_row():
    assert ROWS.keys() == PROJECTS.keys()


def test_errors_know_every_distribution_as_ours():
    assert PROJECTS.keys() == DISTRIBUTIONS


@pytest.mark.parametrize("name", PROJECTS)
def test_a_row_names_the_plugins_and_commands_of_the_distribution(name):
    groups = PROJECTS[name].get("entry-points", {})
    kinds = ("accelerators", "strategies", "plugins", "precisions", "commands")
    for entry in (entry for kind in kinds for entry in groups.get(f"geartrain.{kind}", {})):
        assert re.search(rf"`(geartrain )?{re.escape(entry)}`", ROWS[name]), (
            f"README's row of {name} does not name {entry}"
        )


def test_the_standard_distributions_are_marked():
    standard = {
        re.match(r"[a-z-]+", line)[0]
        for line in PROJECTS["geartrain"]["optional-dependencies"]["standard"]
    }
    assert {name for name, row in ROWS.items() if row.endswith("| yes")} == standard


def test_the_requirements_install_every_distribution_once():
    lines = [
        line.removeprefix("-e ./")
        for name in ("requirements.txt", "tests/requirements.txt")
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if line.startswith("-e ")
    ]
    folders = [
        "core",
        *(
            path.parent.relative_to(ROOT).as_posix()
            for path in ROOT.glob("plugins/*/*/pyproject.toml")
        ),
    ]
    assert sorted(lines) == sorted(folders)
