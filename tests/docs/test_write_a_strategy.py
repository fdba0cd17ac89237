"""docs/write-a-strategy.md shows the template of `geartrain new` and core's functions."""

import inspect
from pathlib import Path

import pytest

from geartrain import hookspecs, parallel
from geartrain_spawn import handover
from geartrain_testing.new import _TEMPLATES

from . import blocks

PAGE = Path(__file__).parents[2] / "docs" / "write-a-strategy.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", ["src/geartrain_mine/strategy.py", "tests/test_mine.py"])
def test_the_page_shows_the_files_of_the_command(file):
    (shown,) = (
        block.text for block in blocks.read_blocks(PAGE) if block.file == f"geartrain-mine/{file}"
    )
    template = (_TEMPLATES / "strategy" / file).read_text(encoding="utf-8")
    assert shown.partition("\n")[2] + "\n" == template, "Fix: copy the template's text to the page"


@pytest.mark.parametrize(
    "function", ["launch", "reserve", "join", "variables", "threads", "raise_on_signals"]
)
def test_parallel_has_the_functions_on_the_page(function):
    assert f"`{function}(" in TEXT
    assert function in parallel.__all__


@pytest.mark.parametrize("function", ["outcome", "apply_result"])
def test_spawn_has_the_functions_on_the_page(function):
    parameters = ", ".join(inspect.signature(getattr(handover, function)).parameters)
    assert f"`{function}({parameters})`" in TEXT
    assert f"`{handover.__name__}`" in TEXT


@pytest.mark.parametrize(
    "hook",
    [
        "plan_processes",
        "launch",
        "shard_dataloader",
        "wrap_model",
        "micro_step",
        "reduce_gradients",
        "log_sync",
    ],
)
def test_hook_is_linked(hook):
    assert f"[`{hook}`](hooks.md#{hook})" in TEXT
    assert hasattr(hookspecs, hook)
