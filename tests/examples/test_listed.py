"""Every example is tested and can be found."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_has_a_test_and_stands_in_the_lists(path):
    assert Path(__file__).with_name(f"test_{path.name}").is_file()
    for page in ("README.md", "docs/examples.md"):
        assert f"examples/{path.name})" in (ROOT / page).read_text(), page  # a link


@pytest.mark.parametrize("page", ["README.md", "docs/examples.md"])
def test_no_list_has_more_than_there_are(page):
    named = re.findall(r"examples/(\w+\.py)\)", (ROOT / page).read_text())
    assert set(named) == {path.name for path in EXAMPLES}


def test_no_test_is_left_of_an_example_that_is_gone():
    tests = {
        path.name.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")
    } - {"listed.py"}
    assert tests == {path.name for path in EXAMPLES}
