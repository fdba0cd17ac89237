"""Core's plain lines of progress, and the choice of the plugin that shows progress."""

import sys
from types import SimpleNamespace

import pytest
from small_models import EvalNet, Logging, Pretend, Stream, fit, loader, trainer

import geartrain as gt
from geartrain import hookimpl

from ..contract_fixtures import dists as dists

#: As without geartrain-callbacks.
ALONE = {"enable_progress_bar": True, "block": ["progress"]}


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of the lines; ``clock.now`` is in seconds."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("geartrain.builtin.progress.time", clock)
    return clock


def logs(self, batch, batch_idx):
    self.log("loss", 0.25 * (batch_idx + 1), prog_bar=True)
    self.log("hidden", 7.0)


class Tick:
    """A step takes ten seconds."""

    def __init__(self, clock):
        self.clock = clock

    @hookimpl
    def on_step_end(self):
        self.clock.now += 10.0


class Slow(EvalNet):
    """A batch of an evaluation takes ten seconds."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.clock.now += 10.0


def test_lines_of_long_epochs(clock, capsys):
    def acc(self, batch, batch_idx):
        self.log("acc", 0.5)

    fit(Logging(logs, acc), val=loader(), max_epochs=2, plugins=[Tick(clock)], **ALONE)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "epoch 1/2: 3/6 batches, 0.1 steps/s",
        "epoch 1/2: 6/6 batches, 0.1 steps/s",
        "epoch 2/2: 3/6 batches, 0.1 steps/s, loss=1.5",
        "epoch 2/2: 6/6 batches, 0.1 steps/s, loss=1.5",
    ]


def test_short_epochs_print_a_line_every_thirty_seconds(clock, capsys):
    tick = Tick(clock)
    fit(Logging(logs), limit_train_batches=1, max_epochs=8, plugins=[tick], **ALONE)
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "epoch 1/8",
        "epoch 4/8",
        "epoch 7/8",
    ]


def test_the_time_of_validation_does_not_count_in_the_rate_of_an_epoch(clock, capsys):
    slow = {"val_check_interval": 1, "limit_train_batches": 2}
    fit(Slow(clock), val=loader(), plugins=[Tick(clock)], **slow, **ALONE)
    assert "epoch 1/1: step 2, 0.1 steps/s, val_loss=" in capsys.readouterr().err


def test_the_closing_figures(clock, capsys):
    fit(Logging(logs), max_epochs=2, plugins=[Tick(clock)], **ALONE)
    assert capsys.readouterr().out.splitlines() == [
        "fit: 12 steps, 2 epochs, 120.0 s",
        "hidden  7",
        "loss    1.5",
    ]


@pytest.mark.parametrize(("command", "metric"), [("test", "test_loss"), ("predict", None)])
def test_the_line_and_the_figures_of_an_evaluation(command, metric, capsys):
    getattr(trainer(**ALONE), command)(EvalNet(), [loader(), loader(8)])
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"{command}: 8 batches, ")
    assert "batches/s" in line
    if metric:
        assert f"{metric}/dataloader_idx_1=" in line
        assert printed.out.startswith(f"{command}: 0.")
        assert metric in printed.out.splitlines()[1]
    else:
        assert printed.out == ""


def test_an_evaluation_of_unknown_length(capsys):
    trainer(**ALONE).validate(EvalNet(), Stream(loader()))
    assert capsys.readouterr().err.startswith("validate: val_loss=")


def test_other_ranks_print_nothing(capsys):
    strategy = type(
        "Second", (Pretend,), {"world": gt.World(rank=1, size=2, local_rank=1, local_size=2)}
    )
    fit(Logging(logs), strategy=strategy(), devices=2, **ALONE)
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_written_does_not_end_the_run(monkeypatch):
    def gone(*arguments, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("geartrain.builtin.progress.ProgressLines._say", gone)
    with pytest.warns(
        UserWarning, match=r"geartrain\[progress_lines\]: on_epoch_end raised OSError"
    ):
        one = fit(max_epochs=2, **ALONE)
    assert one.current_epoch == 2


# --- choice of the plugin -------------------------------------------------------------------------


class Mine:
    shows_progress = True

    @hookimpl
    def on_epoch_end(self):
        print("mine")


def chosen(**options):
    return [part.label for part in trainer(enable_progress_bar=True, **options).plan.plugins]


def test_the_plugin_progress_is_chosen_if_it_is_installed_and_otherwise_cores_lines():
    assert chosen() == ["geartrain-callbacks[progress]"]
    assert chosen(block=["progress"]) == ["geartrain[progress_lines]"]
    assert chosen(block=["progress", "progress_lines"]) == []
    assert trainer().plan.plugins == ()
    (part,) = trainer(enable_progress_bar=True).plan.plugins
    assert part.reason == "enable_progress_bar=True"


@pytest.mark.parametrize(
    ("plugin", "label"), [("progress_lines", "geartrain[progress_lines]"), (Mine, "Mine")]
)
def test_a_plugin_that_is_given_and_shows_progress_is_the_only_one(plugin, label, capsys):
    assert chosen(plugins=[plugin]) == [label]
    fit(plugins=[plugin], enable_progress_bar=True)
    assert "━" not in capsys.readouterr().err


def test_a_bar_that_cannot_be_imported_is_warned_of_and_replaced(dists):
    dists.add("geartrain-callbacks", "1 / 0", plugins={"progress": "Bar"})
    with pytest.warns(
        UserWarning,
        match=r"geartrain-callbacks\[progress\] is not used: .*ZeroDivisionError.*Fix: ",
    ):
        assert chosen() == ["geartrain[progress_lines]"]


def test_a_run_without_a_bar_does_not_import_rich(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert fit(**ALONE).global_step == 6
