"""The page in Chromium: its curves are drawn, and its policy blocks nothing of it."""

import re
import shutil
import subprocess

import pytest

from .conftest import line, png
from .pages import Page
from .test_report import evil

__all__ = ["evil"]

CHROMIUM = next(
    (found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")


@pytest.fixture
def browse(tmp_path_factory):
    """``browse(path)``: open a page; return its elements after its scripts, and the console.

    Args of the function: ``script`` runs after the page's scripts, as a user's clicks; ``size`` of
    the window.
    """

    def open_page(path, script="", size="1280,3000"):
        if script:
            source = path.read_text()
            path = path.with_name("with_script.html")
            # The policy allows only the page's scripts.
            source = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", source)
            path.write_text(source.replace("</body>", f"<script>{script}</script></body>"))
        profile = tmp_path_factory.mktemp("profile")
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
                *("--no-first-run", "--disable-background-networking", "--disable-sync"),
                *("--disable-component-update", f"--user-data-dir={profile}"),
                *(f"--window-size={size}", "--virtual-time-budget=3000"),
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


#: Reports what a user sees after an action: ``saw(text)``.
SAW = "const saw = (text) => { document.title += '|' + text; };"


def seen(page):
    return re.search(r"<title>(.*?)</title>", page.source)[1].split("|")[1:]


def test_an_image_opens_large_with_a_slider_over_the_steps_of_all_runs(
    run_folder, command, folder, browse
):
    for run in ("a", "b"):
        media = [("image", "seen", i, f"media/{i}.png", png()) for i in (10, 20, 30)]
        run_folder(run, lines=[line(1, loss=1.0)], media=media[: 2 if run == "b" else 3])
    assert command("report a b").code == 0
    script = f"""{SAW}
    document.querySelector(".enlarge[data-step='20']").click();
    const dialog = document.querySelector("dialog");
    saw(dialog.open && dialog.querySelector("output").textContent);
    const slider = dialog.querySelector("input");
    slider.value = 2;
    slider.dispatchEvent(new Event("input"));
    saw([...dialog.querySelectorAll("img")].map((img) => img.alt).join(" and "));
    saw([...dialog.querySelectorAll("figcaption")].map((text) => text.textContent).join(" and "));
    dialog.querySelector("button").click();
    saw(dialog.open);"""
    page, console = browse(folder / "report.html", script)
    assert console == []
    assert seen(page) == ["step 20", "a, step 30 and b, step 20", "a and b · step 20", "false"]


@pytest.mark.parametrize("size", ["1280,3000", "420,3000"])
def test_filters_hide_metrics_and_runs_at_every_width(run_folder, command, folder, browse, size):
    for run in ("small", "large"):
        lines = [line(i, loss=1 / (i + 1), acc=i) for i in range(20)]
        plan = {"options": {"seed": len(run)}}
        run_folder(run, lines=lines, plan=plan, provenance=[[0, 0], [9, 99]])
    assert command("report small large").code == 0
    script = f"""{SAW}
    const type = (id, text) => {{
      const input = document.getElementById(id);
      saw(input.checkVisibility());
      input.value = text;
      input.dispatchEvent(new Event(id === "axis" ? "change" : "input"));
    }};
    const shown = (selector) =>
      saw([...document.querySelectorAll(selector)].filter((one) => one.checkVisibility())
        .map((one) => one.textContent.trim()).join(" and "));
    type("filter", "LO");
    shown(".chart .name");
    shown("#results tbody tr[data-metric] th");
    type("runs", "sm");
    shown("#results thead th[data-run]:not(:empty)");
    shown(".chip");
    shown(".runs tbody th");
    type("axis", "step");"""
    page, console = browse(folder / "report.html", script, size)
    assert console == []
    assert seen(page) == [
        *("true", "loss", "loss train, min"),
        *("true", "small", "small", "small", "true"),
    ]
