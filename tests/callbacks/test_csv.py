"""The plugin ``csv``: the file always is a complete table and is never overwritten."""

import csv
import importlib
import math
import sys
import warnings
from contextlib import contextmanager

import pytest
from several_ranks import results
from small_models import EvalNet, Logging, fit, loader, trainer
from threads import on_threads

from geartrain import TrainingError, UsageError, hookimpl
from geartrain_callbacks import csv_logger as module
from geartrain_callbacks.csv_logger import CSVLogger, Table

from ..loggers.cases import open_files

try:
    import resource
except ImportError:
    resource = None

OWN = ["step", "epoch", "stage"]


def test_it_imports_no_callback(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "geartrain_callbacks"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("geartrain_callbacks.csv_logger")
    found = {name for name in sys.modules if name.startswith("geartrain_callbacks.")}
    assert found == {f"geartrain_callbacks.{name}" for name in ("_version", "csv_logger")}


def read(path):
    """Return the table's columns; every line has as many cells as the header."""
    with open(path, encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    assert all(len(line) == len(header) for line in lines)
    return [dict(zip(header, line, strict=True)) for line in lines]


class Logs(EvalNet):
    def training_step(self, batch, batch_idx):
        self.log("loss", 1 / 3)
        return super().training_step(batch, batch_idx)


def logs(**values):
    return Logging(lambda self, batch, batch_idx: self.log_dict(values))


# --- content --------------------------------------------------------------------------------------


def test_columns_that_come_later_stand_last_and_are_empty_before(tmp_path):
    fit(Logs(), val=loader(), output=tmp_path, plugins="csv", max_epochs=2, log_every_n_steps=4)
    lines = read(tmp_path / "metrics.csv")
    assert list(lines[0]) == [*OWN, "loss", "val_loss"]
    assert [(line["step"], line["epoch"], line["stage"]) for line in lines] == [
        ("4", "0", "train"),
        ("6", "0", "validate"),
        ("6", "0", "train"),
        ("8", "1", "train"),
        ("12", "1", "train"),
        ("12", "1", "validate"),
    ]
    of_validation = [line["stage"] == "validate" for line in lines]
    assert [bool(line["val_loss"]) for line in lines] == of_validation
    assert {float(line["loss"]) for line in lines if line["loss"]} == {1 / 3}  # the exact values
    assert [path.name for path in tmp_path.glob("*csv*")] == ["metrics.csv"]
    assert not any("metrics.csv" in name for name in open_files())


def test_names_of_any_kind_nan_and_infinity_are_read_back(tmp_path):
    values = {"a,b": math.nan, 'say "loss"': math.inf, "grün/µ": -math.inf}
    fit(logs(**values), val=loader(), output=tmp_path, plugins="csv")
    (line,) = read(tmp_path / "metrics.csv")
    assert list(line) == [*OWN, *values]
    assert list(line.values()) == ["6", "0", "train", "nan", "inf", "-inf"]


def test_a_plugins_figure_with_the_name_of_a_column(tmp_path):
    class Reports:
        @hookimpl
        def on_run_end(self, run):
            run.hooks.log_metrics(run=run, metrics={"step": 2.0, "stage": 3.0}, step=run.step)

    fit(val=loader(), output=tmp_path, plugins=["csv", Reports()])
    line = read(tmp_path / "metrics.csv")[-1]
    assert (line["step"], line["metric_step"], line["metric_stage"]) == ("6", "2.0", "3.0")


def test_a_header_of_several_lines_is_replaced_whole(tmp_path):
    table = Table(tmp_path / "t.csv")
    for row in ({"two\nlines": 1.0}, {"x": 2.0}, {"three\n\nlines": 3.0}):
        table.add({"step": 1, "epoch": 0, "stage": "train", **row})
    table.close()
    values = [list(line.values())[3:] for line in read(tmp_path / "t.csv")]
    assert values == [["1.0", "", ""], ["", "2.0", ""], ["", "", "3.0"]]


def test_rows_are_cut_also_if_columns_came_later(tmp_path):
    """The strategy elastic cuts what a rank that died wrote after its state was copied."""
    path = tmp_path / "t.csv"
    table = Table(path)
    for number in range(3):
        table.add({"step": number, "epoch": 0, "stage": "train", f"a\n{number}": 1.0})
    table.close()
    CSVLogger(str(path)).cut(path, 2)
    assert [line["step"] for line in read(path)] == ["0", "1"]
    assert path.read_bytes().endswith(b"1,0,train,,1.0,\n")
    assert Table(path).rows == 2
    CSVLogger(str(path)).cut(path, 0)
    assert list(csv.reader(path.open(newline=""))) == [[*OWN, "a\n0", "a\n1", "a\n2"]]
    path.write_text("")
    CSVLogger(str(path)).cut(path, 0)
    assert path.read_text() == ""


def test_what_a_killed_process_left_of_a_wider_table_is_removed(tmp_path):
    (tmp_path / ".table.csv.1234").write_text("half")
    (tmp_path / ".other.csv.1234").write_text("of another program")
    fit(plugins=[CSVLogger(str(tmp_path / "table.csv"))])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.csv.1234", "table.csv"]


def test_a_line_is_written_as_soon_as_it_is_logged(tmp_path):
    path, found = tmp_path / "deep" / "m.csv", []

    class Looks(Logs):
        def on_train_epoch_start(self):
            found.append(len(read(path)) if self.current_epoch else 0)

    fit(Looks(), plugins=[CSVLogger(str(path))], max_epochs=3, log_every_n_steps=6)
    assert found == [0, 1, 2]


# --- several runs ---------------------------------------------------------------------------------


def test_a_second_fit_and_a_test_append_to_it(tmp_path):
    one, net = trainer(output=tmp_path, plugins="csv"), Logs()
    for _ in range(2):
        one.fit(net, loader(), loader())
    one.test(net, loader())
    lines = read(tmp_path / "metrics.csv")
    assert [line["stage"] for line in lines] == ["validate", "train"] * 2 + ["test"]
    assert list(lines[0]) == [*OWN, "val_loss", "loss", "test_loss"]


def test_an_existing_file_is_never_overwritten(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("mine")
    message = r"geartrain-callbacks\[csv\].*metrics\.csv.*nothing is overwritten"
    for options in ({"output": tmp_path, "plugins": "csv"}, {"plugins": CSVLogger(str(file))}):
        with pytest.raises(UsageError, match=message):
            fit(**options)
    assert file.read_text() == "mine"


def test_the_folder_of_a_run_that_failed_early_gets_a_new_table(tmp_path):
    def fails(self, batch, batch_idx):
        self.log("x", 1.0)
        if batch_idx:
            raise RuntimeError("no")

    options = {"output": tmp_path, "plugins": "csv", "log_every_n_steps": 1}
    with pytest.raises(RuntimeError, match="no"):
        fit(Logging(fails), **options)
    one = fit(Logs(), **options)
    assert {frozenset(line) for line in read(tmp_path / "metrics.csv")} == {
        frozenset((*OWN, "loss"))
    }
    lines = len(read(tmp_path / "metrics.csv"))
    one.fit(Logs(), loader())
    assert len(read(tmp_path / "metrics.csv")) == 2 * lines, "a later fit appends"


def test_a_users_own_metrics_csv_is_never_touched(tmp_path):
    (tmp_path / "metrics.csv").write_text("mine")
    with pytest.raises(UsageError, match="exists, and nothing is overwritten"):
        fit(Logs(), output=tmp_path, plugins="csv")
    assert (tmp_path / "metrics.csv").read_text() == "mine"


def test_a_file_of_another_kind_is_not_added_to(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TrainingError, match="not a table of metrics"):
        Table(tmp_path / "other.csv")
    assert (tmp_path / "other.csv").read_text() == "a,b\n1,2\n"


def test_no_place_to_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"geartrain-callbacks\[csv\].*--output DIR"):
        fit(plugins="csv")


def test_a_trial_writes_nothing(tmp_path):
    for plugin in ("csv", CSVLogger(str(tmp_path / "m.csv"))):
        fit(Logs(), output=tmp_path / "run", plugins=[plugin], fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", [0, 1])
def test_two_ranks_write_once(tmp_path, first):
    net = Logs()
    one, _ = on_threads(first=first, output=tmp_path, plugins="csv", log_every_n_steps=2)
    for _ in range(2):
        one.fit(net, loader())
    assert [int(line["step"]) for line in read(tmp_path / "metrics.csv")] == [2, 3] * 2


# --- new columns ----------------------------------------------------------------------------------


def test_each_new_name_is_a_column_of_the_one_table(tmp_path):
    path, table = tmp_path / "t.csv", Table(tmp_path / "t.csv")
    for step, name in enumerate(["a", "b", "a", "c", "b"]):
        table.add({"step": step, "epoch": 0, "stage": "train", name: 0.5})
    table.close()
    table = Table(path)
    table.add({"step": 5, "epoch": 0, "stage": "train", "d": 0.5})
    table.close()
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]
    lines = read(path)
    assert list(lines[0]) == [*OWN, "a", "b", "c", "d"]
    assert [next(name for name in "abcd" if line[name]) for line in lines] == list("abacbd")


def test_no_row_is_lost_when_a_column_cannot_be_added(tmp_path, monkeypatch):
    path, table = tmp_path / "t.csv", Table(tmp_path / "t.csv")
    table.add({"step": 1, "epoch": 0, "stage": "train", "a": 0.5})
    before = path.read_bytes()

    @contextmanager
    def full(path):
        raise TrainingError("disk full")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(module, "replacing", full)
        with pytest.raises(TrainingError, match="disk full"):
            table.add({"step": 2, "epoch": 0, "stage": "train", "b": 0.5})
    assert path.read_bytes() == before
    table.add({"step": 3, "epoch": 0, "stage": "train", "b": 0.5})
    table.close()
    lines = [(line["step"], line["a"], line["b"]) for line in read(path)]
    assert lines == [("1", "0.5", ""), ("3", "", "0.5")]


# --- when it cannot be written --------------------------------------------------------------------


class Long(EvalNet):
    late = False

    def training_step(self, batch, batch_idx):
        self.log("loss", 0.123456789)
        if self.late and self.global_step > 8:
            self.log("late" * 25, 0.5)
        return super().training_step(batch, batch_idx)


def train_on_a_full_disk(late):
    """Return the plugin's warnings of a training with a limit on the size of files."""
    net, before = Long(), resource.getrlimit(resource.RLIMIT_FSIZE)
    net.late = late
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = fit(net, plugins=[CSVLogger("m.csv")], log_every_n_steps=1, max_epochs=5)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert one.global_step == 30
    return [str(warning.message) for warning in caught if "csv" in str(warning.message)]


@pytest.mark.skipif(resource is None, reason="Windows has no limit of a file's size")
@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_leaves_a_right_table_and_one_warning(tmp_path, late):
    """In a process with a limit on file sizes; ``late``: it is reached in a copy of the table."""
    ((warning,),) = results(tmp_path, train_on_a_full_disk, late, ranks=1, place="alone")
    assert "geartrain-callbacks[csv]: log_metrics raised TrainingError: disk full" in warning
    lines = read(tmp_path / "m.csv")
    assert [int(line["step"]) for line in lines] == list(range(1, len(lines) + 1))
    assert 5 < len(lines) < 15
    assert [path.name for path in tmp_path.glob("*m.csv*")] == ["m.csv"]


def test_a_file_in_place_of_the_folder_is_one_warning(tmp_path):
    (tmp_path / "folder").write_text("mine")
    plugin = CSVLogger(str(tmp_path / "folder" / "m.csv"))
    with pytest.warns(
        UserWarning, match=r"geartrain-callbacks\[csv\]: on_run_start raised"
    ) as caught:
        one = fit(Logs(), plugins=[plugin], log_every_n_steps=1)
    assert one.global_step == 6
    assert sum("csv" in str(warning.message) for warning in caught) == 1
    assert (tmp_path / "folder").read_text() == "mine"


def test_it_is_closed_after_an_error(tmp_path):
    class Fails(Logs):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(Fails(), output=tmp_path, plugins="csv", log_every_n_steps=1)
    assert len(read(tmp_path / "metrics.csv")) == 3
    assert not any("metrics.csv" in name for name in open_files())
