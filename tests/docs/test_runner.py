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


def test_blocks_share_a_namespace_and_a_folder(run, tmp_path):
    run(
        fenced("python", "# pack/age.py", "x = 1")
        + fenced("python", "from pack.age import x")
        + fenced("console", "$ cat pack/age.py", "# pack/age.py", "x = 1")
        + fenced("python", "assert x == 1")
    )
    assert (tmp_path / "pack" / "age.py").exists()


def test_text_right_after_python_is_its_output(run):
    run(fenced("python", "print('a', 1.234)", "print('b')") + fenced("text", "a 1...", "b"))
    with pytest.raises(blocks.Wrong, match=r"page.md:5: the page shows"):
        run(fenced("python", "print('a')") + fenced("text", "b"))


def test_text_after_prose_is_ignored(run):
    run(fenced("python", "print('a')") + "These are files:\n\n" + fenced("text", "b"))


def test_a_command_may_have_several_lines_and_may_fail_if_the_page_handles_it(run):
    run(
        fenced(
            "console",
            "$ echo a \\",
            "    b || false",
            "a b",
            "$ false || echo failed: $?",
            "failed: 1",
        )
    )


def test_commands_of_a_block_share_a_shell(run):
    run(fenced("console", "$ cd /", "$ pwd", "/") + fenced("console", "$ ls page.md", "page.md"))


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


def test_width_of_a_table_does_not_count():
    blocks.check_output(
        ["┏━━━━┳━━┓", "│ name    │ ... │"], "┏━━━━━━━━┳━━━━━━━━━━━━━┓\n│ name   │ accelerator │\n"
    )


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


def test_skipped_blocks_and_commands_are_listed_with_their_reason(run, tmp_path):
    run(
        "<!-- not run: it would take a day -->\n\n"
        + fenced("python", "raise SystemExit")
        + fenced(
            "console",
            "$ echo a",
            "a",
            "<!-- not run: no network -->",
            "$ false",
            "b",
            "$ echo c",
            "c",
        )
        + "<!-- not run:  -->\n"
        + fenced("bash", "ls")
    )
    found = [
        pair for block in blocks.read_blocks(tmp_path / "page.md") for pair in blocks.not_run(block)
    ]
    assert found == [
        ("page.md:4", "it would take a day"),
        ("page.md:7: false", "no network"),
        ("page.md:17", ""),
    ]
