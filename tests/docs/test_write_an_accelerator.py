"""docs/write-an-accelerator.md shows the template of `geartrain new` and the hooks to write."""

import re
from pathlib import Path

import pytest

from geartrain import hookspecs
from geartrain_testing.new import _TEMPLATES

from . import blocks

PAGE = Path(__file__).parents[2] / "docs" / "write-an-accelerator.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_shows_the_files_of_the_command():
    file = "src/geartrain_mine/accelerator.py"
    (shown,) = (
        block.text for block in blocks.read_blocks(PAGE) if block.file == f"geartrain-mine/{file}"
    )
    template = (_TEMPLATES / "accelerator" / file).read_text(encoding="utf-8")
    assert shown.partition("\n")[2] + "\n" == template, "Fix: copy the template's text to the page"


@pytest.mark.parametrize("hook", sorted(set(re.findall(r"\(hooks\.md#(\w+)\)", TEXT))))
def test_linked_hook_exists(hook):
    assert hasattr(hookspecs, hook)


@pytest.mark.parametrize(
    "hook",
    ["setup_device", "teardown_device", "device_batches", "device_stats", "check_plan", "step"],
)
def test_hook_is_linked(hook):
    assert f"[`{hook}`](hooks.md#{hook})" in TEXT


@pytest.mark.parametrize(
    "member",
    ["priority", "unavailable()", "device_count()", "indexed", "select_devices(", "diagnose()"],
)
def test_member_is_named(member):
    assert f"`{member}" in TEXT
