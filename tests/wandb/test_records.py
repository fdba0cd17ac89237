"""The records of a run, read back from its file."""

import json
import math
import pickle
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import wandb

import geartrain as gt
from geartrain import hookimpl
from geartrain.callbacks import ModelCheckpoint
from geartrain.testing import ThreadRanks
from geartrain_wandb import WandB, session

from .cases import Handed, Late, Net, loader, offline, trainer
from .conftest import separate_wandb, services
from .record import recorded


def plain(rows):
    """A float for which NaN equals itself."""
    return [
        {k: "nan" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
        for row in rows
    ]


class Many:
    """A plugin that logs more than a block of the file holds."""

    @hookimpl
    def on_epoch_end(self, run):
        figures = {f"figure {i}": i / 7 for i in range(3000)}
        if run.epoch == 1:
            run.hooks.log_metrics(run=run, metrics=figures, step=run.step)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with every option, its record, and the values that other loggers got."""
    folder, handed = tmp_path_factory.mktemp("trained"), Handed()
    given = {"name": "n", "entity": "e", "group": "g", "tags": ["a", "b"], "notes": "long"}
    with separate_wandb(folder):
        one = trainer(offline(**given), Late(), Many(), handed, output="out")
        one.fit(Net(lr=0.25), loader(), loader())
        (record,) = recorded(folder)
        return SimpleNamespace(record=record, handed=handed.rows, trainer=one)


# --- metrics --------------------------------------------------------------------------------------


def test_every_metric_is_kept_with_its_step(trained):
    rows = trained.record.rows
    assert plain(rows) == plain(trained.handed)
    assert [row["trainer/global_step"] for row in rows if "loss_step" in row] == list(range(1, 9))
    late = [(row["trainer/global_step"], row["late"]) for row in rows if "late" in row]
    assert late == [(1, 7.5), (5, 7.5)]
    validated = [(row["trainer/global_step"], row["epoch"]) for row in rows if "val" in row]
    assert validated == [(4, 0), (8, 1)]
    (row,) = [row for row in rows if "figure 0" in row]
    assert [row[f"figure {i}"] for i in range(3000)] == [i / 7 for i in range(3000)]


def test_the_axis_of_the_charts_is_the_optimizer_step(trained):
    metrics = trained.record.of("metric")
    axes = {metric.glob_name or metric.name: metric.step_metric for metric in metrics}
    assert axes == {"trainer/global_step": "", "*": "trainer/global_step"}


def test_the_summary_has_the_last_values_and_the_status(trained):
    run, logged = trained.record, trained.trainer.logged_metrics
    assert run.summary["geartrain/status"] == "done"
    assert run.exit_code == 0
    assert {name: run.summary[name] for name in logged} == logged
    assert len(logged) == 3


def test_the_configuration_holds_hyperparameters_and_the_plan(trained):
    config = trained.record.config
    assert config["lr"] == 0.25
    assert config["geartrain"]["command"] == "fit"
    assert config["geartrain"]["options"]["max_epochs"] == 2
    plan = trained.trainer.plan.as_dict().keys() - {"hyperparameters"}
    assert config["geartrain"].keys() == plan | {"command"}


def test_options_reach_wandb(trained):
    found = trained.record.run
    assert (found.project, found.display_name, found.entity) == ("tests", "n", "e")
    assert (found.run_group, list(found.tags), found.notes) == ("g", ["a", "b"], "long")


def test_checkpoints_are_not_uploaded_by_default(trained):
    assert not trained.record.of("artifact")


def test_images_histograms_texts_and_tables(tmp_path):
    class Shows(Net):
        def on_validation_epoch_end(self):
            if self.current_epoch == 0:
                self.log_image("images/cat", torch.tensor([[[0, 255]]], dtype=torch.uint8))
                self.log_histogram("weights", torch.tensor([0.0, 1.0, 1.0]))
                self.log_text("said", "<hello>")
                self.log_table("table", {"name": ["a"], "n": [1]})
                self.logger.experiment.log({"own": 1.5})

    trainer(offline()).fit(Shows(), loader(), loader())
    (run,) = recorded(tmp_path)
    rows = [row for row in run.rows if any(name.endswith("/_type") for name in row)]
    assert [row["trainer/global_step"] for row in rows] == [4, 4, 4, 4]
    kinds = {k: v for row in rows for k, v in row.items() if k.endswith("/_type")}
    assert kinds == {
        "images/cat/_type": "image-file",
        "weights/_type": "histogram",
        "said/_type": "html-file",
        "table/_type": "table-file",
    }
    assert sum(rows[1]["weights/values"]) == 3
    (files,) = tmp_path.glob("wandb/offline-run-*/files")
    assert "&lt;hello&gt;" in (files / rows[2]["said/path"]).read_text()
    assert json.loads((files / rows[3]["table/path"]).read_text())["data"] == [["a", 1]]
    assert any(row.get("own") == 1.5 for row in run.rows)


def test_each_command_is_a_separate_run(tmp_path):
    one, module = trainer(offline(), max_epochs=1), Net()
    for _ in range(2):
        one.fit(module, loader())
    one.test(module, loader())
    first, second, tested = recorded(tmp_path)
    assert [run.run.job_type for run in (first, second, tested)] == ["fit", "fit", "test"]
    for run in (first, second):
        assert len([row for row in run.rows if "loss_step" in row]) == 4
    assert tested.rows == [{"trainer/global_step": 4, "epoch": 1, "tested": 1}]


def test_only_the_first_of_two_ranks_has_a_run(tmp_path):
    options = {"wandb": {"mode": "offline", "project": "by name"}}
    one = trainer("wandb", strategy=ThreadRanks(2), plugin_options=options)
    one.fit(Net(), loader(), loader())
    (run,) = recorded(tmp_path)
    assert [row["trainer/global_step"] for row in run.rows if "loss_step" in row] == [1, 2, 3, 4]
    assert (run.config["geartrain"]["processes"], run.run.project) == (2, "by name")


def test_a_wandb_that_only_the_plugin_uses_has_no_process_left(monkeypatch):
    monkeypatch.setattr(session, "_alone", True)
    during = []

    class Counts:
        @hookimpl
        def on_epoch_end(self):
            during.append(len(services()))

    one = trainer(offline(), Counts(), max_epochs=1)
    for _ in range(2):
        one.fit(Net(), loader())
        assert not services()
    assert len(during) == 2
    assert min(during) >= 1


def test_system_metrics_are_recorded_automatically(tmp_path):
    def batches():
        deadline = time.monotonic() + 30
        (path,) = tmp_path.rglob("run-*.wandb")
        while b"proc.memory.rssMB" not in path.read_bytes():
            assert time.monotonic() < deadline
            yield torch.ones(2, 1)

    class Batches:
        def __iter__(self):
            yield torch.ones(2, 1)
            yield from batches()

    trainer(offline(), max_epochs=1, log_every_n_steps=10**6).fit(Net(), Batches())
    (run,) = recorded(tmp_path)
    assert {"cpu", "memory_percent", "proc.memory.rssMB"} <= run.stats


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "variable", "output", "where"),
    [
        ({}, None, None, "wandb"),
        ({}, None, "out", "out/wandb"),
        ({}, "env", "out", "env/wandb"),
        ({"folder": Path("mine/deep")}, "env", "out", "mine/deep/wandb"),
    ],
)
def test_the_folder(tmp_path, monkeypatch, options, variable, output, where):
    if variable:
        (tmp_path / variable).mkdir()
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / variable))
    trainer(offline(**options), output=output, max_epochs=1).fit(Net(), loader())
    (path,) = tmp_path.rglob("run-*.wandb")
    assert path.parents[1] == tmp_path / where


def test_options_override_environment_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "from the environment")
    trainer(WandB(), max_epochs=1).fit(Net(), loader())
    monkeypatch.setenv("WANDB_MODE", "disabled")
    trainer(WandB(mode="offline", project="given"), max_epochs=1).fit(Net(), loader())
    projects = [run.run.project for run in recorded(tmp_path)]
    assert projects == ["from the environment", "given"]


@pytest.mark.parametrize("how", ["variable", "option", "fast_dev_run"])
def test_nothing_is_written(tmp_path, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    one = {
        "variable": WandB(),
        "option": WandB(mode="disabled"),
        "fast_dev_run": WandB(mode="offline"),
    }[how]
    trainer(one, fast_dev_run=how == "fast_dev_run", output="out").fit(Net(), loader())
    assert not list(tmp_path.rglob("*.wandb"))
    assert not (tmp_path / "wandb").exists()
    assert not services()


# --- checkpoints ----------------------------------------------------------------------------------


def test_each_checkpoint_is_an_artifact(tmp_path):
    module = Net()
    trainer(offline(checkpoints=True), output="out").fit(module, loader())
    (run,) = recorded(tmp_path)
    first, last = run.of("artifact")
    for artifact, step in ((first, 4), (last, 8)):
        assert (artifact.type, list(artifact.aliases)) == ("model", ["latest"])
        assert artifact.name == f"model-{run.id}"
        assert json.loads(artifact.metadata)["step"] == step
        (file,) = artifact.manifest.contents
        assert file.path == "last.ckpt"
        # The first is a copy, so the second has not overwritten it.
        assert torch.load(file.local_path)["step"] == step


def test_the_best_are_artifacts_that_outlive_their_files(tmp_path):
    class Rises(Net):
        def validation_step(self, batch, batch_idx):
            self.log("rising", float(self.current_epoch))

    best = ModelCheckpoint("rising", mode="max", dirpath="best", filename="{step}")
    trainer(offline(checkpoints=True), best).fit(Rises(), loader(), loader())
    (run,) = recorded(tmp_path)
    files = [next(iter(artifact.manifest.contents)) for artifact in run.of("artifact")]
    assert [file.path for file in files] == ["step=4.ckpt", "step=8.ckpt"]
    assert [torch.load(file.local_path)["step"] for file in files] == [4, 8]
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step=8.ckpt"]


def test_missing_checkpoints_give_a_warning():
    with pytest.warns(UserWarning, match=r"checkpoints=True.*--output"):
        trainer(offline(checkpoints=True)).fit(Net(), loader())


# --- end of a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ValueError("too bad"), "failed", 1),
        (KeyboardInterrupt(), "interrupted", 255),
    ],
)
def test_a_run_that_ends_early_is_marked(tmp_path, error, status, code):
    with pytest.raises(type(error)):
        trainer(offline()).fit(Net(fails=error), loader())
    (run,) = recorded(tmp_path)
    assert run.exit_code == code
    assert run.summary["geartrain/status"] == status
    assert run.summary["geartrain/error"] == f"{type(error).__name__}: {error}"
    assert [row["trainer/global_step"] for row in run.rows if "loss_step" in row] == [1, 2, 3, 4]
    assert wandb.run is None


def test_the_scripts_own_run_is_used_and_stays_open(tmp_path):
    mine = wandb.init(mode="offline", project="script", name="mine", config={"own": 1, "lr": 3})
    message = "own run mine is used, and stays open; not used: mode, project"
    with pytest.warns(UserWarning, match=message):
        trainer(offline()).fit(Net(), loader())
    assert wandb.run is mine
    mine.log({"after": 1})
    mine.finish()
    (run,) = recorded(tmp_path)
    assert run.run.project == "script"
    assert (run.config["own"], run.config["lr"]) == (1, 0.5)
    assert len(run.rows) == 8 + 2 + 1
    assert run.rows[-1]["after"] == 1


class Kill:
    """A plugin that kills wandb's service after the first epoch, like an out-of-memory killer."""

    @hookimpl
    def on_epoch_end(self, run):
        for process in services() if run.epoch == 0 else ():
            process.kill()
        psutil.wait_procs(services(), timeout=10)


def test_a_dead_service_stops_nothing_and_the_next_run_has_its_own(tmp_path):
    module, one = Net(), trainer(offline(), Kill())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        one.fit(module, loader())
    assert one.global_step == 8
    assert len([w for w in said if "geartrain-wandb[wandb]" in str(w.message)]) == 1
    trainer(offline(folder="second")).fit(module, loader())
    (run,) = recorded(tmp_path / "second")
    assert len(run.rows) == 10
    assert run.exit_code == 0


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "sometimes"}, "mode='sometimes'"),
        ({"tags": "one"}, "tags='one'"),
        ({"project": "a/b"}, "a/b"),
        ({"tags": ["x" * 65]}, "tag"),
        ({"name": 3}, "run_name=3"),
        ({"folder": "file"}, "folder='file'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(tmp_path, options, says):
    (tmp_path / "file").touch()
    with pytest.raises(gt.UsageError, match=r"geartrain-wandb\[wandb\]") as refused:
        trainer(offline(**options)).check(Net)
    assert says in str(refused.value)
    assert not services()


def test_the_plugin_can_be_pickled():
    assert vars(pickle.loads(pickle.dumps(offline(tags=["a"])))) == vars(offline(tags=["a"]))
