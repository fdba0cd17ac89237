"""docs/write-a-strategy.md and write-an-accelerator.md: templates of `geartrain new`, functions."""

import inspect
from pathlib import Path

import pytest

from geartrain import parallel
from geartrain_spawn import handover
from geartrain_testing.new import _TEMPLATES

from . import blocks

DOCS = Path(__file__).parents[2] / "docs"
STRATEGY, ACCELERATOR = DOCS / "write-a-strategy.md", DOCS / "write-an-accelerator.md"


@pytest.mark.parametrize(
    ("page", "file"),
    [
        (STRATEGY, "strategy/src/geartrain_mine/strategy.py"),
        (STRATEGY, "strategy/tests/test_mine.py"),
        (ACCELERATOR, "accelerator/src/geartrain_mine/accelerator.py"),
    ],
    ids=lambda value: str(value).rpartition("/")[2],
)
def test_the_page_shows_the_files_of_the_command(page, file):
    name = f"geartrain-mine/{file.partition('/')[2]}"
    (shown,) = (block.text for block in blocks.read_blocks(page) if block.file == name)
    template = (_TEMPLATES / file).read_text(encoding="utf-8")
    assert shown.partition("\n")[2] + "\n" == template, "Fix: copy the template's text to the page"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        (
            STRATEGY,
            "plan_processes launch shard_dataloader wrap_model micro_step reduce_gradients "
            "log_sync",
        ),
        (ACCELERATOR, "setup_device teardown_device device_batches device_stats check_plan step"),
    ],
    ids=["strategy", "accelerator"],
)
def test_hooks_to_write_are_linked(page, names):
    """test_reference.py checks that links lead to hooks."""
    text = page.read_text(encoding="utf-8")
    assert [name for name in names.split() if f"[`{name}`](hooks.md#{name})" not in text] == []


def test_members_of_an_accelerator_are_named():
    text = ACCELERATOR.read_text(encoding="utf-8")
    members = "priority unavailable() device_count() indexed select_devices( diagnose()"
    assert [member for member in members.split() if f"`{member}" not in text] == []


def test_functions_of_the_strategys_page_exist():
    text = STRATEGY.read_text(encoding="utf-8")
    names = {"launch", "reserve", "join", "variables", "threads", "raise_on_signals"}
    assert names <= set(parallel.__all__)
    assert [name for name in names if f"`{name}(" not in text] == []
    for name in ("outcome", "apply_result"):
        parameters = ", ".join(inspect.signature(getattr(handover, name)).parameters)
        assert f"`{name}({parameters})`" in text
    assert f"`{handover.__name__}`" in text
