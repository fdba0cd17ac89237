"""blocks.py itself: a wrong page does not pass."""

import sys
import textwrap

import pytest

from . import blocks


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the text of a page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "page", None)

    def run(text):
        page = tmp_path / "page.md"
        page.write_text(textwrap.dedent(text))
        blocks.run_page(page, tmp_path)

    return run


def fenced(language, *lines):
    return "\n".join([f"```{language}", *lines, "```", ""])


# --- correct pages --------------------------------------------------------------------------------


def test_error_has_the_line_on_the_page(run):
    with pytest.raises(
        blocks.Wrong, match=r'(?s)^page.md:4: .*File "page.md", line 5.*ZeroDivisionError'
    ):
        run("# Page\n\n" + fenced("python", "x = 0", "1 / x"))


# --- output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expected",
    [
        ["a 1 b", "c"],
        ["a ... b", "c"],
        ["...", "c"],
        ["a 1 b", "...", "c"],
        ["a 1 b", "..."],
        ["a ...", "...", "...", "d e"],
        ["d    e"],
        [],
    ],
)
def test_expected_output_is_found(expected):
    blocks.check_output(expected, "a 1 b\nc\nd e\n")


@pytest.mark.parametrize(
    "expected",
    [["a 1"], ["1 b"], ["c", "a 1 b"], ["a 1 b", "d e"], ["a ... e"], ["x"], ["d", "...", "e"]],
)
def test_missing_output_is_an_error(expected):
    with pytest.raises(blocks.Wrong, match="but the output is"):
        blocks.check_output(expected, "a 1 b\nc\nd e\n")


# --- wrong pages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (fenced("bash", "ls"), "a block of 'bash' is not run"),
        (fenced("console", "$ false"), "ended with exit code 1"),
        (fenced("console", "$ echo a", "b"), "but the output is"),
        (
            fenced("console", "$ echo a", "a", "$ echo b >&2; exit 3", "$ echo c"),
            r"(?s)echo b.*exit code 3:\nb",
        ),
        (fenced("console", "ls"), "begins with a line"),
        (fenced("console"), "has a line"),
        (fenced("python", "1 +"), "SyntaxError"),
        (fenced("toml", "a ="), "no toml"),
        (fenced("yaml", "a: ["), "no yaml"),
        (fenced("json", "{"), "no json"),
        (fenced("python", "# ../outside.py", "x = 1"), "outside the page's folder"),
        (fenced("python", "import sys; sys.exit(0)"), "SystemExit"),
    ],
)
def test_wrong_page_is_refused(text, why, run):
    with pytest.raises(blocks.Wrong, match=why):
        run(text)


# --- not run --------------------------------------------------------------------------------------
