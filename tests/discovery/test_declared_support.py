"""The oldest versions that the packages declare are those of `tox -e torch-oldest`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "plugins" / "tools" / "testing" / "src" / "geartrain_testing" / "templates"


def test_the_oldest_torch_is_the_one_that_is_tested():
    (tested,) = re.findall(
        r"^    torch==(\d+\.\d+)\.0$", (ROOT / "tox.ini").read_text(encoding="utf-8"), re.MULTILINE
    )
    files = [
        ROOT / "core" / "pyproject.toml",
        *ROOT.glob("plugins/*/*/pyproject.toml"),
        *TEMPLATES.glob("*/pyproject.toml"),
    ]
    declared = {
        path: re.findall(r'"torch([^"]*)"', path.read_text(encoding="utf-8")) for path in files
    }
    assert {bound for bounds in declared.values() for bound in bounds} == {f">={tested}"}
