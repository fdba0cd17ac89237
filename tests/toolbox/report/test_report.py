"""``geartrain report`` as a whole: its page and its errors."""

import base64
import hashlib
import json
import subprocess
import sys

import pytest
from small_models import Net, loader

import geartrain as gt

from .conftest import line, png
from .pages import Page

PLAN = {
    "accelerator": {"name": "cpu", "distribution": "geartrain", "reason": "the only one"},
    "strategy": {"name": "ddp", "distribution": "geartrain-ddp", "reason": "--strategy ddp"},
    "precision": {"name": "32-true", "distribution": "geartrain", "reason": "the default"},
    "processes": 2,
    "plugins": [{"name": "csv", "distribution": "geartrain-callbacks", "reason": "--plugin csv"}],
    "passed_over": {"geartrain-dp[dp]": "available"},
    "notes": {"learning rate": "is multiplied by 2"},
    "options": {"max_epochs": 3, "seed": 1},
    "hyperparameters": {"hidden": 8, "data.batch_size": 4},
}
DONE = {"status": "done", "command": "fit", "seconds": 7.5, "steps": 300, "epochs": 3}
LOSS = [line(1, loss=3.0), line(2, loss=2.0)]


def test_a_run_of_a_trainer(folder, command):
    run = {"enable_progress_bar": False, "log_every_n_steps": 1, "max_epochs": 2}
    gt.Trainer(output="run", **run).fit(Net(), loader())
    done = command("report run")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("report: run/report.html (1 run, 0.1 MB)")
    page = Page(folder / "run" / "report.html")
    assert page.data["runs"] == ["run"]
    assert all(len(one["series"][0]["x"]) > 1 for one in page.data["charts"])
    for text in ("✓ done", "fit · single · cpu · 32-true", "the default", "max_epochs 2"):
        assert text in page.text


def test_the_parts_of_a_page(run_folder, command, folder):
    run_folder(
        "run",
        lines=[*LOSS, line(2, "validate", acc=0.5), line(2, "test", acc=0.25)],
        plan=PLAN,
        summary={**DONE, "status": "failed", "error": "ValueError: too hot"},
        logs={
            0: "a.py:1: UserWarning: slow disk\n[rank0]: b.py:2: UserWarning: slow disk\n",
            1: "Traceback\nValueError: too hot\n",
        },
        profile={
            "steps": 60,
            "ranks": [0, 1],
            "parts": [{"name": "backward", "ms_per_step": 1.25, "share": 0.5}],
            "hooks": [{"plugin": "w[w]", "hook": "log_metrics", "ms_per_step": 0.4, "calls": 9}],
        },
        media=[
            ("image", "sample", 10, "media/a.png", png()),
            ("figure", "plot", 10, "media/b.png", png(200, 100)),
            ("text", "note", 10, "media/n.txt", b"hello"),
            (
                "histogram",
                "weights",
                10,
                "media/h.json",
                b'{"counts": [1, 2], "edges": [-1, 0, 1]}',
            ),
            ("table", "errors", 10, "media/t.json", b'{"columns": ["digit"], "rows": [[3], [8]]}'),
        ],
    )
    assert command("report run").code == 0
    page = Page(folder / "run" / "report.html")
    for text in (
        "✕ failed 300 3 7.5 s 25.0 fit · ddp · cpu · 32-true 2 – –",
        "ValueError: too hot End of logs/rank-0.log",
        "End of logs/rank-1.log Traceback ValueError: too hot",
        "UserWarning: slow disk (2 times)",
        "learning rate: is multiplied by 2",
        "acc validate, max 0.5 step 2, epoch 1",
        "acc test, max 0.25 step 2",
        "loss train, min 2 step 2, epoch 1",
        "run ms per step, 60 steps backward 1.25 50 %",
        "w[w] log_metrics 0.4 9 calls",
        "hello step 10",
        "weights histogram 1 step -1 1 step 10",
        "digit 3 8 step 10",
        "plugin csv geartrain-callbacks --plugin csv",
        "model.hidden 8 data.batch_size 4",
        "geartrain-dp[dp] available",
    ):
        assert text in page.text, page.text
    sizes = [(image["width"], image["height"]) for image in page.named("img")]
    assert sizes == [("96", "96"), ("200", "100")]
    assert [attributes["height"] for attributes in page.named("rect")] == ["20.0", "40.0"]


def test_a_run_without_an_end_shows_its_last_step(run_folder, command, folder):
    run_folder("run", lines=[*LOSS, '{"step": 3, "st'])
    done = command("report run")
    assert "run: metrics.jsonl: the last line is not complete" in done.out
    page = Page(folder / "run" / "report.html")
    assert "no end recorded: in progress, or killed 2" in page.text
    assert "the last line is not complete" in page.text
    assert "There is no plan.json." in page.text


def test_values_that_cannot_be_drawn_are_counted(run_folder, command, folder):
    run_folder("run", lines=[*LOSS, line(3, loss="nan"), line(4, loss="inf"), line(5, loss=1.0)])
    assert command("report run").code == 0
    page = Page(folder / "run" / "report.html")
    assert page.curve("loss") == {"run": 0, "x": [1, 2, 3, 4, 5], "y": [3.0, 2.0, None, None, 1.0]}
    assert "run: 2 values are NaN or infinite, the first at step 3" in page.text


# --- several runs ---------------------------------------------------------------------------------


def test_runs_share_charts_and_their_plans_are_compared(run_folder, command, folder):
    other = {**PLAN, "options": {"max_epochs": 3, "seed": 2}, "hyperparameters": {"hidden": 16}}
    run_folder("runs/run-10", lines=[line(5, loss=1.0), line(6, loss=0.5)], plan=other)
    run_folder("runs/run-2", lines=LOSS, plan=PLAN)
    done = command("report runs")
    assert done.out.startswith("report: runs/report.html (2 runs, ")
    page = Page(folder / "runs" / "report.html")
    assert page.data["runs"] == ["run-2", "run-10"]
    assert page.curve("loss", 0)["x"] == [1, 2]
    assert page.curve("loss", 1)["x"] == [5, 6]
    first = page.text[page.text.index("Best values") : page.text.index(" Runs Run State")]
    assert first == (
        "Best values and differences Metric run-2 run-10 loss train, min 2 step 2, epoch 1 "
        "★ 0.5 step 6, epoch 1 Difference model.hidden 8 16 data.batch_size 4 – seed 1 2"
    )


def test_one_name_in_two_stages_is_two_charts(run_folder, command, folder):
    run_folder("run", lines=[*LOSS, line(1, "validate", loss=9.0), line(2, "validate", loss=8.0)])
    assert command("report run").code == 0
    charts = Page(folder / "run" / "report.html").data["charts"]
    assert [chart["series"][0]["y"] for chart in charts] == [[3.0, 2.0], [9.0, 8.0]]


def test_runs_with_one_name_are_called_by_their_folders(run_folder, command, folder):
    run_folder("big/run", lines=LOSS)
    run_folder("small/run", lines=LOSS)
    run_folder("other", lines=LOSS)
    assert command("report big/run small/run other big -o all.html").code == 0
    assert Page(folder / "all.html").data["runs"] == ["big/run", "small/run", "other"]


def test_several_folders_are_written_to_the_working_directory(run_folder, command, folder):
    run_folder("a", lines=LOSS)
    run_folder("b", lines=LOSS)
    assert "report: report.html (2 runs" in command("report a b").out
    assert (folder / "report.html").exists()


def test_many_long_curves_stay_under_3_megabytes(run_folder, command, folder):
    names = [f"metric_{i}" for i in range(150)]
    for run in ("a", "b"):
        run_folder(run, lines=[line(i, **dict.fromkeys(names, i / 7)) for i in range(800)])
    assert command("report a b").code == 0
    assert (folder / "report.html").stat().st_size < 3e6


def test_the_best_value_has_its_step_and_epoch_and_the_last_value(run_folder, command, folder):
    """The sixth epoch of 10 steps ends at step 60; a metric of unknown direction has its range."""
    run_folder(
        "run",
        lines=[
            line(10 * i, "validate", epoch=i - 1, val_loss=abs(i - 3.5), val_f1=i / 10, temper=i)
            for i in range(1, 7)
        ],
        summary={**DONE, "epochs": 6},
    )
    assert command("report run").code == 0
    text = Page(folder / "run" / "report.html").text
    for row in (
        "Best values Metric run val_loss validate, min 0.5 step 30, epoch 3; last 2.5",
        "val_f1 validate, max 0.6 step 60, epoch 6 ",
        "temper validate 6 1 to 6",
    ):
        assert row in text, text


# --- the x axis -----------------------------------------------------------------------------------


def epochs(count, steps=10, unlike=0):
    return [
        line(steps * e + s + 1, epoch=e, loss=1.0 + unlike)
        for e in range(count)
        for s in range(4, steps, 5)
    ]


def test_epochs_are_the_x_axis_of_a_run_with_several(run_folder, command, folder):
    run_folder("run", lines=epochs(3), summary={**DONE, "epochs": 3})
    assert command("report run").code == 0
    page = Page(folder / "run" / "report.html")
    assert page.data["axes"] == {"epoch": [[[0, 10, 20, 30], [0, 1, 2, 3]]], "step": []}
    assert "x axis epoch step" in page.text


def test_an_epoch_that_has_not_ended_is_no_whole_one(run_folder, command, folder):
    run_folder("run", lines=epochs(4)[:-1])
    assert command("report run").code == 0
    (knots,) = Page(folder / "run" / "report.html").data["axes"]["epoch"]
    assert knots == [[0, 10, 20, 30, 35], [0, 1, 2, 3, 3.5]]


def test_time_is_the_x_axis_of_a_run_with_one_epoch(run_folder, command, folder):
    run_folder("run", lines=epochs(1, steps=100), provenance=[[10, 1.0], [50, 5.0], [100, 12.5]])
    assert command("report run").code == 0
    axes = Page(folder / "run" / "report.html").data["axes"]
    assert list(axes) == ["time", "step", "epoch"]
    assert axes["time"] == [[[10, 50, 100], [1.0, 5.0, 12.5]]]


def test_the_time_of_a_resumed_run_leaves_out_the_pause(run_folder, command, folder):
    """It resumes at step 20, and its clock starts again."""
    lines = [{}, [10, 1.0], [20, 2.0], [30, 3.0], {}, [25, 0.5], [40, 2.0], "odd", [1], [50, -1]]
    run_folder("run", lines=epochs(1, steps=50), provenance=lines)
    assert command("report run").code == 0
    (knots,) = Page(folder / "run" / "report.html").data["axes"]["time"]
    assert knots == [[10, 20, 25, 40], [1.0, 2.0, 2.5, 4.0]]


def test_an_axis_that_a_run_lacks_is_not_offered(run_folder, command, folder):
    run_folder("a", lines=epochs(2), provenance=[[10, 1.0], [20, 2.0]])
    run_folder("b", lines=epochs(2))
    run_folder("c", lines=[{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}])
    assert command("report a b -o ab.html").code == command("report a c -o ac.html").code == 0
    assert list(Page(folder / "ab.html").data["axes"]) == ["epoch", "step"]
    assert list(Page(folder / "ac.html").data["axes"]) == ["step"]


# --- how a run was started ------------------------------------------------------------------------


def test_the_page_shows_how_each_run_was_started(run_folder, command, folder):
    start = {
        "command": "geartrain fit digits.py --model.lr 0.1",
        "directory": "/home/ada",
        "commit": "3e21753",
        "uncommitted_changes": True,
        "started": "2026-11-26 13:00:05",
        "host": "gpu7",
        "parameters": 18570,
        "trainable_parameters": 170,
    }
    run_folder("run", lines=LOSS, provenance=[{**start, "host": "old"}, start])
    run_folder("older", lines=LOSS)
    assert command("report run older -o page.html").code == 0
    text = Page(folder / "page.html").text
    for shown in (
        "How run was started command geartrain fit digits.py --model.lr 0.1 directory /home/ada",
        "commit 3e21753, with uncommitted changes",
        "started 2026-11-26 13:00:05 (start 2: the run was resumed)",
        "host gpu7 parameters 18,570 (170 trainable)",
    ):
        assert shown in text, text
    assert "How older was started" not in text


# --- safety ---------------------------------------------------------------------------------------

EVIL = "<script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"


@pytest.fixture
def evil(run_folder):
    """A run that has EVIL wherever a run can have text."""
    part = {"name": EVIL, "distribution": EVIL, "version": EVIL, "reason": EVIL}
    media = [
        ("image", EVIL, 1, "media/a.png", png()),
        ("text", EVIL, 1, "media/n.txt", EVIL.encode()),
        (EVIL, EVIL, 1, "media/n.txt", EVIL.encode()),
        (
            "table",
            EVIL,
            1,
            "media/t.json",
            json.dumps({"columns": [EVIL], "rows": [[EVIL]]}).encode(),
        ),
    ]
    return run_folder(
        "<script>document.title='evil'<",
        lines=[line(1, EVIL, **{EVIL: 1.0}), line(2, EVIL, **{EVIL: "nan"})],
        plan={
            "accelerator": part,
            "strategy": part,
            "precision": part,
            "processes": EVIL,
            "plugins": [part],
            "passed_over": {EVIL: EVIL},
            "notes": {EVIL: EVIL},
            "options": {EVIL: EVIL},
            "hyperparameters": {EVIL: EVIL},
        },
        summary={"status": EVIL, "command": EVIL, "error": EVIL, "steps": EVIL, "epochs": EVIL},
        logs={0: f"x: UserWarning: {EVIL}\n"},
        provenance=[
            dict.fromkeys(("command", "commit", "started", "host", "parameters"), EVIL),
            *([EVIL, EVIL], [1, 1.0], [2, 2.0]),
        ],
        profile={
            "steps": EVIL,
            "parts": [{"name": EVIL, "ms_per_step": EVIL, "share": EVIL}],
            "hooks": [{"plugin": EVIL, "hook": EVIL, "ms_per_step": EVIL, "calls": EVIL}],
        },
        media=media,
    )


def test_text_of_runs_is_never_markup(evil, command, folder):
    assert command(f'report "{evil}" -o page.html').code == 0
    page = Page(folder / "page.html")
    assert len(page.scripts) == 3
    assert all(not name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.named("img"))
    assert page.text.count(EVIL.replace("  ", " ")) > 20
    assert page.data["charts"][0]["name"] == EVIL


def test_only_the_pages_own_parts_may_run_and_nothing_is_fetched(run_folder, command, folder):
    run_folder("run", lines=LOSS)
    assert command("report run").code == 0
    page = Page(folder / "run" / "report.html")
    policy = next(meta["content"] for meta in page.named("meta") if "http-equiv" in meta)
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))

    def hashes(texts):
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    assert allowed["default-src"] == "'none'"
    assert allowed["script-src"] == hashes(page.scripts[1:])  # the first one is the data
    assert allowed["style-src"] == hashes(page.styles)
    assert not [a for _, attrs in page.elements for a in attrs if a in ("href", "style", "action")]
    assert not [attrs for tag, attrs in page.elements if tag in ("link", "iframe", "object")]


@pytest.mark.parametrize("file", ["../secret.txt", "/etc/hostname", "media/none.txt", "media"])
def test_the_index_of_media_names_only_files_of_the_run(run_folder, command, folder, file):
    (folder / "secret.txt").write_text("the secret")
    run_folder("run", lines=LOSS, media=[("text", "note", 1, file, None)])
    done = command("report run")
    assert "run: media/index.jsonl: 1 line names no file of this run" in done.out
    assert "the secret" not in (folder / "run" / "report.html").read_text()


def test_media_with_other_contents_are_named(run_folder, command, folder):
    media = [
        ("image", "a", 1, "media/a.png", b"GIF89a"),
        ("histogram", "h", 1, "media/h.json", b'{"counts": "many"}'),
        ("image", "b", 1, "media/b.png", png() + bytes(2_000_000)),
        ("film", "f", 1, "media/f.mp4", b"0"),
    ]
    run_folder("run", lines=LOSS, media=media)
    assert command("report run").code == 0
    text = Page(folder / "run" / "report.html").text
    for said in (
        "media/a.png cannot be shown: its file has other contents",
        "media/h.json cannot be shown: its file has other contents",
        "media/b.png is too large for the page (2.0 MB)",
        "media/f.mp4 is of an unknown kind, film",
    ):
        assert said in text


def test_small_images_have_more_steps_for_the_slider(run_folder, command, folder):
    media = [("image", "seen", i, f"media/{i}.png", png()) for i in range(30)]
    run_folder("run", lines=LOSS, media=media)
    assert command("report run").code == 0
    page = Page(folder / "run" / "report.html")
    assert len(page.named("img")) == 24
    steps = [button["data-step"] for button in page.named("button") if "data-step" in button]
    assert (steps[0], steps[-1]) == ("0", "29")


def test_eight_of_many_steps_are_shown_with_the_first_and_the_last(run_folder, command, folder):
    media = [("text", "note", i, f"media/{i}.txt", b"x") for i in range(30)]
    run_folder("run", lines=LOSS, media=media)
    assert command("report run").code == 0
    text = Page(folder / "run" / "report.html").text
    assert "8 of 30 steps x step 0" in text
    assert "x step 29" in text


@pytest.mark.parametrize("contents", ["", "[]", '{"plugins": 3, "options": ['])
def test_a_wrong_json_file_becomes_a_note(run_folder, command, contents):
    home = run_folder("run", lines=LOSS)
    files = ("plan.json", "summary.json", "profile.json")
    for file in files:
        (home / file).write_text(contents)
    done = command("report run")
    assert done.code == 0, done.err
    for file in files:
        assert f"run: {file} is not a JSON object, and is left out." in done.out


def test_json_of_other_types_does_not_stop_the_report(run_folder, command):
    odd = {"plugins": 3, "options": [], "strategy": 1, "notes": "x", "processes": None}
    summary = {"status": [], "seconds": "long", "steps": {}, "error": "\ud800"}
    profile = {"steps": None, "parts": [3, {}], "hooks": {"a": 1}}
    run_folder("run", lines=[], plan=odd, summary=summary, profile=profile)
    done = command("report run")
    assert done.code == 0, done.err


# --- wrong usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "no folder is given.\nFix: geartrain report DIR"),
        ("rnus", "rnus does not exist. Did you mean 'runs'?\nFix: pass the folder"),
        ("far/away", "far/away does not exist.\nFix: pass the folder"),
        ("runs/a/metrics.jsonl", "is a file, not the folder of a run.\nFix: pass its folder"),
        ("empty", "empty is not the folder of a run, and contains none"),
        ("deep", "it has no plan.json, no metrics.jsonl, no summary.json."),
        ("deep", "Fix: geartrain report deep/far/exp"),
        ("s3://bucket/run", "DIR='s3://bucket/run' is a URL"),
        ("runs -o s3://bucket/a.html", "-o='s3://bucket/a.html' is a URL"),
        ("runs -o runs", "-o runs is a folder.\nFix: -o runs/report.html"),
        ("runs -o net.py", "net.py exists and is no page of geartrain report"),
        ("runs --open", "there is no option --open. Known: -o FILE"),
        ("runs -o", "expected one argument"),
    ],
)
def test_wrong_usage_is_refused(run_folder, refused, folder, options, message):
    run_folder("runs/a", lines=LOSS)
    run_folder("deep/far/exp/b", plan=PLAN)
    (folder / "empty").mkdir()
    error = refused(f"report {options}")
    assert message in error
    assert not (folder / "runs" / "report.html").exists()


def test_a_file_that_cannot_be_read_is_named(run_folder, refused, folder):
    run_folder("run", plan=PLAN)
    (folder / "run" / "metrics.jsonl").mkdir()  # root may read every file, but no folder as a file
    error = refused("report run")
    assert "run/metrics.jsonl cannot be read: Is a directory.\nFix: allow this user" in error


def test_too_many_runs_are_refused(run_folder, refused):
    for i in range(51):
        run_folder(f"runs/{i}", lines=[])
    assert "at most 50 runs, not 51" in refused("report runs")


def test_a_report_replaces_an_older_report(run_folder, command, folder):
    home = run_folder("run", lines=LOSS)
    assert command("report run").code == 0
    with (home / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(line(3, loss=1.0))}\n")
    assert command("report run").code == 0
    assert Page(home / "report.html").curve("loss")["x"] == [1, 2, 3]
    assert sorted(path.name for path in home.iterdir()) == ["metrics.jsonl", "report.html"]


@pytest.mark.end_to_end
def test_torch_is_not_imported(run_folder, folder):
    run_folder("run", lines=LOSS)
    code = "import sys; from geartrain.commands import main; main(['report', 'run'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"
