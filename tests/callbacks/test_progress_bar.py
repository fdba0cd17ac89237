"""The progress bar on a terminal, plain lines elsewhere, and the final table."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pyte
import pytest
import torch
from command_line import installed as installed
from rich.console import Console
from rich.progress import Progress
from small_models import EvalNet, Logging, Net, Pretend, fit, loader, trainer

import geartrain as gt
from geartrain import hookimpl
from geartrain_callbacks import EarlyStopping, ModelCheckpoint
from geartrain_callbacks.bars import Terminal, _Bars
from geartrain_callbacks.lines import Count

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor, during a drawing and afterwards


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Make standard output and error a terminal."""
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "150"}.items():
        monkeypatch.setenv(name, value)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(type(stream), "isatty", lambda self: True, raising=False)


@pytest.fixture
def plain(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "150")


@pytest.fixture
def clock(monkeypatch):
    """Set the bar's clock to ``clock.now`` seconds."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    for module in ("progress_bar", "bars", "lines"):
        monkeypatch.setattr(f"geartrain_callbacks.{module}.time", clock)
    return clock


def text(drawn):
    """Return text without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)


def logs(self, batch, batch_idx):
    self.log("loss", 0.25 * (batch_idx + 1), prog_bar=True)
    self.log("hidden", 7.0)


def test_a_bar_on_a_terminal(terminal, clock, capsys):
    def prints(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (0, 2):
            print("printed by the user")
        logs(self, batch, batch_idx)

    streams = sys.stdout, sys.stderr
    fit(Logging(prints), max_epochs=2, enable_progress_bar=True, log_every_n_steps=1)
    drawn = capsys.readouterr().err
    (line,) = [line for line in re.split("[\r\n]+", text(drawn)) if "printed by" in line]
    assert "epoch" not in line
    assert drawn.index(line) < drawn.rindex("epoch 1/2")
    assert "epoch 1/2" in text(drawn)
    assert "epoch 2/2" in text(drawn)
    assert "6/6" in text(drawn)
    assert "loss=1.5" in text(drawn)
    above = ("epoch 1/2: ", "epoch 2/2: ")  # the lines of finished epochs have every metric
    bars = [line for line in re.split("[\r\n]+", text(drawn)) if not line.startswith(above)]
    assert "hidden" not in "".join(bars)
    assert drawn.rindex(SHOW) > drawn.rindex(HIDE)
    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_bar_is_stopped_on_an_error(terminal, capsys, error):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise error
            return super().training_step(batch, batch_idx)

    streams = sys.stdout, sys.stderr
    with pytest.raises(error):
        fit(Fails(), enable_progress_bar=True)
    drawn = capsys.readouterr()
    assert drawn.err.rindex(SHOW) > drawn.err.rindex(HIDE)
    assert (sys.stdout, sys.stderr) == streams
    assert "steps" not in drawn.out  # a failed run has no final table


def test_a_bar_of_a_run_without_end_or_length(terminal, capsys):
    fit(train=iter(list(loader())), enable_progress_bar=True, max_epochs=-1, max_steps=6)
    drawn = text(capsys.readouterr().err)
    assert "epoch 1" in drawn
    assert "epoch 1/" not in drawn


class Tick:
    """A plugin that makes each step take some seconds."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    @hookimpl
    def on_step_end(self):
        self.clock.now += self.seconds


@pytest.fixture
def draws(clock, monkeypatch):
    """Record when each drawing was made; a drawing takes ``clock.drawing`` seconds."""
    times, clock.drawing = [], 0.0

    def refresh(self):
        clock.now += clock.drawing
        times.append(clock.now)

    monkeypatch.setattr(Progress, "refresh", refresh)
    return times


@pytest.mark.parametrize(
    ("seconds", "drawing", "most"),
    [(0.0, 0, 4), (0.001, 0, 6), (10.0, 0, 210), (0.01, 0.01, 6), (1.0, 9.0, 210)],
)
def test_redraws_are_limited(terminal, clock, draws, seconds, drawing, most):
    """Over 200 steps: at most 10 redraws a second and 1/300 of the time, except at epoch ends."""
    clock.drawing, tick = drawing, Tick(clock, seconds)
    train = (list(loader()) * 40)[:200]
    fit(train=train, plugins=[tick], enable_progress_bar=True)
    assert most / 2 - 1 <= len(draws) <= most


def test_a_line_for_each_epoch_without_a_terminal(plain, clock, monkeypatch, capsys):
    """However short the epochs are. The variable for colours is no reason to draw in a file."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    module = Logging(logs, lambda self, batch, batch_idx: self.log("acc", 0.5))
    options = {"max_epochs": 10, "plugins": [Tick(clock, 1.0)], "enable_progress_bar": True}
    fit(module, val=loader(), **options)
    printed = capsys.readouterr().err
    assert HIDE not in printed
    _, *lines = printed.splitlines()
    figures = "1.0 steps/s, loss=1.5 acc=0.5 hidden=7"
    assert lines == [f"epoch {n}/10: step {6 * n}, {figures}" for n in range(1, 11)]


@pytest.mark.parametrize("where", ["terminal", "plain"])
def test_the_closing_table_lists_every_metric(where, request, capsys):
    request.getfixturevalue(where)
    fit(Logging(logs), max_epochs=2, enable_progress_bar=True)
    printed = text(capsys.readouterr().out)
    assert "fit: 12 steps, 2 epochs" in printed
    for name, value in {"loss": "1.5", "hidden": "7"}.items():
        assert re.search(rf"{name}\W+{value}\W", printed)


@pytest.mark.parametrize(
    ("command", "metric"), [("validate", "val_loss"), ("test", "test_loss"), ("predict", None)]
)
def test_the_line_and_the_table_of_an_evaluation(plain, command, metric, capsys):
    getattr(trainer(enable_progress_bar=True), command)(EvalNet(), loader())
    printed = capsys.readouterr()
    assert metric in printed.out if metric else printed.out == ""
    assert "0 steps" not in printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith(f"{command}: 6 batches, ")
    assert "batches/s" in line
    if metric:
        assert f"{metric}=" in line


def test_the_bar_of_an_evaluation(terminal, clock, capsys):
    """The bar counts finished batches, and names the loader if there are several."""

    class Slow(EvalNet):
        def forward(self, x):
            clock.now += 1.0
            return super().forward(x)

    trainer(enable_progress_bar=True).test(Slow(), [loader(), loader(8)])
    drawn = capsys.readouterr().err
    for loader_of, total in (("1/2", 6), ("2/2", 2)):
        shown = re.findall(rf"test {loader_of}\D+?(\d+)/{total}\b", text(drawn))
        assert list(dict.fromkeys(map(int, shown)))[:total] == list(range(total))
    assert "1.0 batches/s" in text(drawn)
    assert "0:00:03 left" in text(drawn)
    assert re.search(r"2/2\D+2/2 ", text(drawn))  # full at the end
    assert drawn.rindex(SHOW) > drawn.rindex(HIDE)


def test_validation_is_a_second_bar_that_goes_away(terminal, clock, capsys):
    """Its time does not count in the training rate."""

    class Slow(EvalNet):
        def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
            clock.now += 100.0

    options = {"plugins": [Tick(clock, 1.0)], "enable_progress_bar": True}
    fit(Slow(), val=loader(8), val_check_interval=3, **options)
    drawn = capsys.readouterr().err
    both = text(drawn).replace("\r", "")
    bars = r"epoch 1/1\W+3/6 1.0 steps/s +0:00:03 left *\nvalidate\W+1/2 0.0 batches/s"
    assert re.search(bars, both)
    # The output after the second bar was removed.
    last = re.sub(r".*\x1b\[1A\x1b\[2K", "", drawn, flags=re.DOTALL)
    assert "validate" not in last
    assert "6/6 1.0 steps/s" in text(last)


def test_the_time_left_knows_max_steps(terminal, clock, capsys):
    options = {"max_epochs": -1, "max_steps": 5, "accumulate_grad_batches": 2}
    plugins = [Tick(clock, 1.0)]
    fit(train=list(loader()) * 2, plugins=plugins, enable_progress_bar=True, **options)
    drawn = text(capsys.readouterr().err)
    assert "2/10 1.0 steps/s 0:00:04 left" in drawn
    assert "10/10" in drawn


@pytest.mark.parametrize(("given", "length"), [(2, 2), (-1, 6)])
def test_the_sanity_check_has_its_own_length(terminal, capsys, given, length):
    fit(EvalNet(), val=loader(), enable_progress_bar=True, num_sanity_val_steps=given)
    assert re.search(rf"sanity check\W+0/{length} ", text(capsys.readouterr().err))


def test_a_long_epoch_prints_a_line_from_time_to_time(plain, clock, capsys):
    class Slow(EvalNet):
        def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
            clock.now += 20.0

    options = {"plugins": [Tick(clock, 10.0)], "enable_progress_bar": True}
    fit(Slow(), train=list(loader()) * 2, val=loader(), **options)
    _, *lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "epoch 1/1: 3/12 batches, 0.1 steps/s, 0:01:30 left"
    assert lines[3] == "epoch 1/1: 12/12 batches, 0.1 steps/s"
    assert lines[4] == "epoch 1/1, validate: 2/6 batches, 0.1 batches/s, 0:01:20 left"
    assert lines[-1].startswith("epoch 1/1: step 12, 0.1 steps/s, val_loss=")
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [("TERM", "dumb"), ("TERM", "unknown"), ("TTY_COMPATIBLE", "0"), ("TTY_INTERACTIVE", "0")],
)
def test_a_terminal_that_cannot_redraw_gets_lines(terminal, monkeypatch, capsys, name, value):
    monkeypatch.setenv(name, value)
    fit(enable_progress_bar=True)
    _, line = capsys.readouterr().err.splitlines()
    assert line.startswith("epoch 1/1: step 6, ")


def test_the_plugin_progress_lines_has_lines_on_a_terminal(terminal, capsys):
    fit(enable_progress_bar=True, plugins=["progress_lines"])
    assert capsys.readouterr().err.splitlines()[1].startswith("epoch 1/1: step 6, ")


def test_no_color(terminal, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR")
    fit(enable_progress_bar=True)
    drawn = capsys.readouterr().err
    assert "6/6" in drawn
    assert "\x1b[38;" not in drawn


@pytest.mark.parametrize("columns", [1, 20, 60])
def test_a_narrow_terminal_keeps_one_line_a_bar(terminal, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))

    def train(self, batch, batch_idx):
        for name in "abcdefgh":
            self.log(f"a_long_name_{name}", 1.0, prog_bar=True)

    fit(Logging(train), log_every_n_steps=1, enable_progress_bar=True)
    _, _, drawn = capsys.readouterr().err.partition("\n")  # without the header, which may wrap
    assert "\x1b[1A" not in drawn  # a single line needs no cursor-up
    lines = [text(line) for line in re.split(r"[\r\n]", drawn)]
    assert max(map(len, lines)) <= columns
    if columns >= 20:
        assert any("6/6" in line for line in lines)


ONE = {"train_loss": 0.123456, "val_acc": 0.98765, "grad_norm": 1234567.0, "lr": 1e-05}


def drawn_at(columns, metrics, counts=("epoch 12/100",), done=123):
    """Return the lines of the bars on a terminal with so many columns."""
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    bars = _Bars(console)
    bars._draw = lambda: console.print(bars._progress.get_renderable())
    bars.show([Count(title, 469, time.monotonic() - 2, done=done) for title in counts], metrics)
    return text(console.file.getvalue()).splitlines()


@pytest.mark.parametrize(("columns", "shown"), [(40, 0), (60, 2), (80, 2), (120, 3), (400, 4)])
def test_whole_metrics_are_shown_at_each_width(columns, shown):
    """A cut number would be another number."""
    for title in ("validate", "validate 2/2"):
        for line in drawn_at(columns, ONE, ["epoch 12/100", title]):
            assert len(line) <= columns
        first, second = drawn_at(columns, ONE, ["epoch 12/100", title])
        assert "123/469" in first
        assert "123/469" in second
        whole = ["train_loss=0.1235", "val_acc=0.9877", "grad_norm=1.235e+06", "lr=1e-05"]
        for name, value in (one.split("=") for one in whole):
            for after in re.findall(rf"{name}=(\S*)", first):
                assert after == value
        assert sum(one in first for one in whole) >= shown
        assert ("…" in first) == (sum(one in first for one in whole) < 4)
        assert ("━" in first) == (columns >= 80)


def test_the_name_of_a_metric_is_shortened_and_not_its_number():
    name = "validation/mean_average_precision_over_all_classes_and_sizes"
    (line,) = drawn_at(60, {name: 0.123456})
    assert re.search(r" validation/\w+…=0.1235$", line)


@pytest.mark.parametrize("titles", [["epoch 1/2"], ["epoch 1/2", "validate"]])
def test_a_terminal_that_becomes_narrower_keeps_no_old_lines(monkeypatch, titles):
    """pyte, unlike a terminal, does not wrap lines again; ``resize`` does."""
    console = Console(file=io.StringIO(), width=120, height=24, force_terminal=True)
    screen, metrics = pyte.Screen(120, 24), {"loss": 0.5}
    bars = Terminal(console)
    counts = [Count(title, 469, time.monotonic() - 2, done=123) for title in titles]
    console.print("printed by the user")
    bars.show(counts, metrics)
    pyte.Stream(screen).feed(console.file.getvalue().replace("\n", "\r\n"))
    lines = [line.ljust(120) for line in screen.display[: 1 + len(titles)]]
    narrow = pyte.Screen(70, 24)
    pyte.Stream(narrow).feed(lines[0].rstrip() + "\r\n" + "\r\n".join(lines[1:]))
    console.file.seek(0)
    console.file.truncate()
    console.width = 70
    bars.show(counts, metrics)
    bars.stop()
    pyte.Stream(narrow).feed(console.file.getvalue().replace("\n", "\r\n"))
    shown = [line.strip() for line in narrow.display if line.strip()]
    assert shown[0] == "printed by the user"
    assert [line.split("  ")[0].split(" ━")[0].split(" ╸")[0] for line in shown[1:]] == titles


def test_brackets_in_a_name_are_not_markup(terminal, capsys):
    module = Logging(lambda self, *_: self.log("[red]a[/b]", 1.0, prog_bar=True))
    fit(module, log_every_n_steps=1, enable_progress_bar=True)
    printed = capsys.readouterr()
    assert "[red]a[/b]=1" in text(printed.err)
    assert re.search(r"\[red\]a\[/b\]\W+1\W", text(printed.out))


def test_a_terminal_that_goes_away_does_not_end_the_run(terminal, clock, monkeypatch):
    def gone(self):
        raise OSError(5, "Input/output error")

    class Gone:
        @hookimpl
        def on_step_end(self, run):
            clock.now += 1.0
            if run.step == 2:
                monkeypatch.setattr(Progress, "refresh", gone)

    streams = sys.stdout, sys.stderr
    one = fit(EvalNet(), val=loader(), enable_progress_bar=True, plugins=[Gone()])
    assert one.global_step == 6
    assert (sys.stdout, sys.stderr) == streams


def screen_of(drawn, columns=150, lines=60):
    """Return the lines that a terminal shows after this output."""
    screen = pyte.Screen(columns, lines)
    pyte.Stream(screen).feed(drawn.replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display if line.strip()]


def losses(*values, name="val_loss", **options):
    """Train with these values of a metric, one an epoch."""

    def validates(self, batch, batch_idx):
        self.log(name, values[self.current_epoch], prog_bar=True)

    options = {"max_epochs": len(values), "num_sanity_val_steps": 0, **options}
    return fit(Logging(logs, validates), val=loader(), enable_progress_bar=True, **options)


@pytest.mark.parametrize("columns", [60, 150])
def test_finished_epochs_stay_above_the_bar_and_the_best_are_marked(
    terminal, clock, monkeypatch, capsys, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    losses(0.5, 0.25, 0.75)
    printed = capsys.readouterr()
    _, *epochs, bar = screen_of(printed.err, columns)
    assert [line[: len("epoch 1/3: step 18")] for line in epochs] == [
        "epoch 1/3: step 6,",
        "epoch 2/3: step 12",
        "epoch 3/3: step 18",
    ]
    assert [line.endswith(", best so far") for line in epochs] == [True, True, False]
    assert "val_loss=0.25" in epochs[1] if columns == 150 else "val_loss=0.2 " not in epochs[1]
    assert bar.startswith("epoch 3/3")
    assert "3 epochs, 0.0 s, best val_loss=0.25 in epoch 2" in printed.out


@pytest.mark.parametrize(
    ("name", "plugins", "best"),
    [
        ("val_acc", [], []),
        ("val/loss", [], [1, 3]),
        ("val_acc", [ModelCheckpoint(monitor="val_acc", mode="max")], [1, 2]),
        ("val_acc", [EarlyStopping(monitor="val_acc", mode="max")], [1, 2]),
        ("val_loss", [ModelCheckpoint()], [1, 3]),
    ],
)
def test_the_metric_of_the_best_epoch(plain, tmp_path, capsys, name, plugins, best):
    losses(0.5, 0.75, 0.25, name=name, plugins=plugins, output=tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch")]
    assert [n for n, line in enumerate(lines, 1) if line.endswith(", best so far")] == best


def test_an_epoch_after_a_resume_is_compared_with_those_before(plain, tmp_path, capsys):
    def run(epochs, **resume):
        plugins = [ModelCheckpoint(monitor="val_loss")]
        one = trainer(max_epochs=epochs, plugins=plugins, output=tmp_path, enable_progress_bar=True)
        values = [0.25, 0.5]

        def validates(self, batch, batch_idx):
            self.log("val_loss", values[self.current_epoch])

        one.fit(Logging(logs, validates), loader(), loader(), **resume)
        return capsys.readouterr().err

    assert "best so far" in run(1)
    resumed = run(2, ckpt_path="last")
    assert "resumes after 6 steps" in resumed
    assert "best so far" not in resumed


# --- the line before a fit, and those after it ----------------------------------------------------


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(1000, 1).requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "options", "line"),
    [
        (Net, {}, "Net (21 parameters) on cpu"),
        (Frozen, {"output": "x"}, "Frozen (1,022 parameters, 21 trainable) on cpu, in x"),
        (
            Net,
            {"strategy": Pretend(), "devices": 2},
            "Net (21 parameters) on 2 cpu devices with Pretend",
        ),
    ],
)
def test_a_fit_begins_with_its_module_devices_and_folder(
    plain, tmp_path, monkeypatch, capsys, module, options, line
):
    monkeypatch.chdir(tmp_path)
    one = fit(module(), enable_progress_bar=True, **options)
    assert capsys.readouterr().err.splitlines()[0] == line
    one.validate(EvalNet(), loader())
    assert " on cpu" not in capsys.readouterr().err


def test_lazy_parameters_are_not_counted(plain, capsys):
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.lazy = torch.nn.LazyLinear(1)

    fit(Lazy(), enable_progress_bar=True)
    assert "Lazy (21 parameters, 2 without a shape yet)" in capsys.readouterr().err


def test_a_fit_ends_with_the_place_of_its_files(plain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one = fit(enable_progress_bar=True, output="my run")
    expected = ["saved in my run", "look: geartrain report 'my run'"]
    assert capsys.readouterr().out.splitlines()[-2:] == expected
    one.fit(Net(), loader())  # a second fit of the same trainer
    again = capsys.readouterr()
    assert again.err.startswith("Net (21 parameters) on cpu, in my run\n")
    assert again.out.splitlines()[-2:] == expected


def test_a_fit_without_a_folder_says_that_nothing_was_saved(plain, tmp_path, capsys):
    def last_line(**options):
        fit(enable_progress_bar=True, **options)
        return capsys.readouterr().out.splitlines()[-1]

    class Logger:
        @hookimpl
        def log_metrics(self, metrics):
            pass

    assert last_line() == 'nothing was saved: output="DIR"'
    assert last_line(plugins=[Logger()]) == 'no checkpoint was saved: output="DIR"'
    assert last_line(fast_dev_run=True, output=tmp_path) == "nothing was saved: fast_dev_run"
    assert last_line(plugins=[ModelCheckpoint(dirpath=tmp_path)]) == f"saved in {tmp_path}"


def test_a_fit_without_geartrain_tools_names_no_command_of_it(plain, tmp_path, installed, capsys):
    installed.remove("geartrain-tools")
    fit(enable_progress_bar=True, output=tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == f"saved in {tmp_path}"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_fit_that_fails_says_nothing_of_saved_files(plain, tmp_path, capsys, error):
    def fails(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise error

    with pytest.raises(error):
        fit(Logging(fails), max_epochs=2, enable_progress_bar=True, output=tmp_path)
    assert capsys.readouterr().out == ""


class SecondRank(Pretend):
    world = gt.World(rank=1, size=2, local_rank=1, local_size=2)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": SecondRank(), "devices": 2, "enable_progress_bar": True},
        {"enable_progress_bar": False},
    ],
)
def test_other_ranks_and_runs_without_the_bar_print_nothing(terminal, capsys, options):
    fit(Logging(logs), **options)
    assert capsys.readouterr() == ("", "")


# --- real programs --------------------------------------------------------------------------------

PROGRAM = """
import logging, os, signal, sys, time, warnings
import torch
import geartrain as gt

class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            print("printed by the user")
            warnings.warn("warned by the user")
        if batch_idx == 4 and "interrupt" in sys.argv:
            os.kill(os.getpid(), signal.SIGINT)
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Batches:
    def __len__(self): return 6
    def __iter__(self):
        for _ in range(6):
            time.sleep(0.12)
            yield torch.ones(2, 3)

gt.Trainer(accelerator="cpu", max_epochs=1).fit(Net(), Batches())
"""


def in_a_terminal(tmp_path, *arguments, stdout=None):
    """Run ``PROGRAM`` in a pseudo-terminal.

    Return its output, True if the terminal's settings are unchanged, and the exit code.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 400, 0, 0))
    left_out = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    environment["TERM"] = "xterm-256color"
    command = [sys.executable, "program.py", *arguments]
    streams = {"stdin": theirs, "stdout": stdout or theirs, "stderr": theirs}
    drawn = b""
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, start_new_session=True, **streams
    ) as process:
        try:
            while process.poll() is None or select.select([ours], [], [], 0)[0]:
                if select.select([ours], [], [], 0.1)[0]:
                    drawn += os.read(ours, 65536)
        finally:
            process.kill()
        same = termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)
    return drawn.decode(), same, process.returncode


@pytest.mark.end_to_end  # test_a_bar_on_a_terminal asserts the same on a simulated terminal
@pytest.mark.timeout(120)
def test_printed_text_appears_above_the_bar(tmp_path):
    drawn, same, code = in_a_terminal(tmp_path)
    assert (same, code) == (True, 0)
    for said in ("printed by the user", "UserWarning: warned by the user"):
        (line,) = [line for line in re.split("[\r\n]+", text(drawn)) if said in line]
        assert "epoch" not in line
    assert drawn.index("printed by the user") < drawn.rindex("epoch 1/1")
    assert drawn.count(HIDE) == drawn.count(SHOW) == 1
    assert drawn.rindex(SHOW) < drawn.index("fit: 6 steps")


@pytest.mark.timeout(120)
def test_an_interrupt_gives_the_cursor_back_and_text_in_a_file_stays_there(tmp_path):
    with open(tmp_path / "out.txt", "w+") as out:
        drawn, same, code = in_a_terminal(tmp_path, "interrupt", stdout=out)
        out.seek(0)
        written = out.read()
    assert (same, code) == (True, -signal.SIGINT)
    assert drawn.rindex(SHOW) > drawn.rindex(HIDE)
    assert drawn.index(SHOW) < drawn.index("KeyboardInterrupt")
    assert written == "printed by the user\n"
    assert "printed by the user" not in drawn
    assert "warned by the user" in drawn
