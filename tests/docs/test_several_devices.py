"""docs/several-devices.md names every hook and option of ddp."""

import inspect
from pathlib import Path

import pytest

import geartrain_ddp
from geartrain_ddp import hookspecs

PAGE = (Path(__file__).parents[2] / "docs" / "several-devices.md").read_text(encoding="utf-8")
HOOKS = [name for name, thing in vars(hookspecs).items() if hasattr(thing, "geartrain_spec")]


def test_ddp_brings_hooks():
    assert HOOKS == ["reduce_bucket"]


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_has_a_section_with_its_signature(hook):
    arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"### {hook}\n\n`{hook}({arguments})`" in PAGE


@pytest.mark.parametrize("option", list(inspect.signature(geartrain_ddp.DDPStrategy).parameters))
def test_option_is_in_the_table(option):
    assert f"| `--strategy.{option}` |" in PAGE
