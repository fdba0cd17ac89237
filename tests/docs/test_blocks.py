"""README.md and every page of docs/: each code block behaves as the page shows."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm import AVAILABLE, Warm

from . import blocks
from .environment import make_environment, variables

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: The pages that a new user reads first. The tests of other pages are marked.
FIRST = {"README.md", "start.md"}
#: Seconds after which a hanging page is killed.
DEADLINE = 240


def _name(page):
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    made = Runner(tmp_path_factory.mktemp("runner"))
    yield made
    made.end()


class Runner:
    """Run one page after another."""

    def __init__(self, folder):
        self._folder, self._warm = folder, None

    def run(self, page, folder):
        place = folder / "page"
        shutil.copytree(
            ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("__pycache__")
        )
        if AVAILABLE and self._warm is None:
            self._warm = Warm(sys.executable, self._folder, variables())
        python, environment = make_environment(folder / "venv", self._warm)
        with subprocess.Popen(
            [python, blocks.__file__, page, place],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,  # so that all processes of the page can be killed with it
        ) as process:
            try:
                printed, _ = process.communicate(timeout=DEADLINE)
            except subprocess.TimeoutExpired:
                self.end()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
                printed = f"{page.name}: not done after {DEADLINE} s\n{printed}"
        return process.returncode, printed

    def end(self):
        if self._warm is not None:
            self._warm.end()
            self._warm = None


@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in FIRST else pytest.mark.page) for page in PAGES],
    ids=_name,
)
def test_page(page, runner, tmp_path):
    code, printed = runner.run(page, tmp_path)
    assert code == 0, printed


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_skipped_blocks_have_a_reason(page):
    for block in blocks.read_blocks(page):
        for place, reason in blocks.not_run(block):
            assert reason, f"{place} is marked 'not run' without a reason"
