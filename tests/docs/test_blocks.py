"""README.md and every page of docs/: each code block does what the page says."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from . import blocks
from .environment import make_environment

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Pages that import torch several times, which takes more than ten seconds.
SLOW = {
    "bagua.md",
    "devices.md",
    "doctor.md",
    "examples.md",
    "from-lightning.md",
    "start.md",
    "tune.md",
    "write-a-plugin.md",
    "write-a-strategy.md",
    "write-an-accelerator.md",
    "wandb.md",
    "loggers.md",
    "callbacks.md",
    "checkpoints.md",
}
#: Seconds until a page that hangs is ended.
DEADLINE = 240


def _name(page):
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def run(tmp_path_factory, request):
    """page -> (exit code, what was printed). The pages run at the same time: most of what they do is importing torch."""
    chosen = [item.callspec.params["page"] for item in request.session.items if getattr(item, "originalname", "") == "test_page"]
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        start = functools.cache(lambda page: pool.submit(_run, page, tmp_path_factory.mktemp(page.stem)))
        if not hasattr(request.config, "workerinput"):  # one of several pytest-xdist workers runs only what it is given
            for page in chosen:
                start(page)
        yield lambda page: start(page).result()


def _run(page, folder):
    place = folder / "page"
    shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    python, environment = make_environment(folder / "venv")
    with subprocess.Popen(
        [python, blocks.__file__, page, place],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        start_new_session=True,  # so that everything the page started can be ended with it
    ) as process:
        try:
            printed, _ = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            printed = f"{page.name}: not done after {DEADLINE} s\n{printed}"
    return process.returncode, printed


@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page.name in SLOW)) for page in PAGES], ids=_name)
def test_page(page, run):
    code, printed = run(page)
    assert code == 0, printed


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_whatever_is_not_run_says_why(page):
    for block in blocks.read_blocks(page):
        for place, reason in blocks.not_run(block):
            assert reason, f"{place} is marked 'not run' without a reason"
