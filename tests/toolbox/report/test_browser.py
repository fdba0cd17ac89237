"""The page in Chromium: its curves are drawn, and its policy blocks nothing of it."""

import shutil
import subprocess

import pytest

from .conftest import line
from .pages import Page
from .test_report import evil

__all__ = ["evil"]

CHROMIUM = next(
    (found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")


@pytest.fixture
def browse(tmp_path_factory):
    """``browse(path)``: open a page; return its elements after its scripts, and the console."""

    def open_page(path):
        profile = tmp_path_factory.mktemp("profile")
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
                *("--no-first-run", "--disable-background-networking", "--disable-sync"),
                *("--disable-component-update", f"--user-data-dir={profile}"),
                *("--window-size=1280,3000", "--virtual-time-budget=3000"),
                *("--enable-logging=stderr", "--dump-dom", path.as_uri()),
            ],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=True,
        )
        file = path.with_suffix(".dumped")
        file.write_text(done.stdout)
        return Page(file), [text for text in done.stderr.splitlines() if "CONSOLE" in text]

    return open_page


def test_the_curves_are_drawn(run_folder, command, folder, browse):
    for run in ("a", "b"):
        run_folder(run, lines=[line(i, loss=1 / (i + 1), acc=i) for i in range(20)])
    assert command("report a b").code == 0
    page, console = browse(folder / "report.html")
    assert console == []
    classes = [attributes.get("class", "") for attributes in page.named("div")]
    assert sum("uplot" in name.split() for name in classes) == 2
    controls = next(one for one in page.named("div") if one.get("id") == "controls")
    assert "hidden" not in controls


def test_text_of_a_run_does_not_run(evil, command, folder, browse):
    assert command(f'report "{evil}" -o page.html').code == 0
    page, console = browse(folder / "page.html")
    assert console == []
    assert "<title>evil</title>" not in page.source
    assert len(page.named("canvas")) == 1
