"""Every example has a test and is listed in the docs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_has_a_test_and_is_listed(path):
    assert Path(__file__).with_name(f"test_{path.name}").is_file()
    for page in ("README.md", "docs/examples.md"):
        assert f"examples/{path.name})" in (ROOT / page).read_text(), page  # a link


@pytest.mark.parametrize("page", ["README.md", "docs/examples.md"])
def test_the_lists_have_no_other_examples(page):
    named = re.findall(r"examples/(\w+\.py)\)", (ROOT / page).read_text())
    assert set(named) == {path.name for path in EXAMPLES}


def test_every_test_belongs_to_an_example():
    tests = {
        path.name.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")
    } - {"listed.py"}
    assert tests == {path.name for path in EXAMPLES}
