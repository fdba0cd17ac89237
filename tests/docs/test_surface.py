"""tests/tools/surface.py notices every kind of addition."""

import runpy
from pathlib import Path

import pytest

SURFACE = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "surface.py"))
LISTED = {"limits": {"lines of core": 9}, "hooks": ["barrier"], "options": {"ddp": ["timeout"]}}


@pytest.mark.parametrize(
    ("found", "lines", "errors"),
    [
        ({}, 9, []),
        ({}, 10, ["lines of core: 10, and the limit is 9"]),
        ({"hooks": ["barrier", "fence"]}, 8, ["new: hooks: fence"]),
        ({"hooks": []}, 9, ["gone: hooks: barrier"]),
        ({"options": {"ddp": ["timeout", "wait"]}}, 9, ["new: options: ddp: wait"]),
        ({"options": {"ddp": ["timeout"], "dp": ["wait"]}}, 9, ["new: options: dp: wait"]),
    ],
)
def test_differences(found, lines, errors):
    names = {"hooks": LISTED["hooks"], "options": LISTED["options"], **found}
    assert SURFACE["differences"](names, {"lines of core": lines}, LISTED) == errors


def test_vague_names_are_counted(tmp_path):
    (tmp_path / "code.py").write_text("what = 1\nfor one in (): message = one\n")
    assert SURFACE["vague"]([tmp_path]) == 2
