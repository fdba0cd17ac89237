"""ModelCheckpoint: it keeps the best files, and deletes one only after the next is complete."""

import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import EvalNet, Logging, fit, loader, trainer

from geartrain import TrainingError, hookimpl
from geartrain.callbacks import ModelCheckpoint
from geartrain.testing import ThreadRanks

NAN, INF = float("nan"), float("inf")


def steps_of(folder):
    """Return name -> the step at which the file was saved."""
    paths = sorted(folder.iterdir()) if folder.exists() else []
    return {path.name: torch.load(path, weights_only=True)["step"] for path in paths}


def run_on(folder, values, every=1.0, train=None, more=(), **options):
    """Train with a metric that takes ``values``, one per epoch; return the callback."""
    left = list(values)

    def logs(module, batch, batch_idx):
        module.log("metric", left[0])
        if module.trainer.run.stage == "validate":
            left.pop(0)

    names = ("max_epochs", "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps")
    of_trainer = {name: options.pop(name) for name in names if name in options}
    of_trainer = {"max_epochs": len(values), "val_check_interval": every, **of_trainer}
    given = {"monitor": "metric", "dirpath": folder, "filename": "{step}", **options}
    callback = ModelCheckpoint(**given)
    module = Logging(train=train, validate=logs)
    fit(module, val=loader(4), plugins=[callback, *more], **of_trainer)
    return callback


# --- which files are kept -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "options", "kept", "best"),
    [
        ([5, 4, 6], {}, [12], 12),
        ([5, 4, 6], {"mode": "max"}, [18], 18),
        ([5, 4, 6, 3], {"save_top_k": 2}, [12, 24], 24),
        ([5, 4, 6, 7], {"save_top_k": 2, "mode": "max"}, [18, 24], 24),
        ([5, 4, 6], {"save_top_k": 5}, [6, 12, 18], 12),
        ([5, 4, 6], {"save_top_k": -1}, [6, 12, 18], 12),
        ([5, 5, 5], {}, [6], 6),
        ([5, 5, 5, 4], {"save_top_k": 2}, [6, 24], 24),
        ([5, 5, 5], {"save_top_k": -1, "mode": "max"}, [6, 12, 18], 6),
        ([NAN, 5, NAN], {}, [12], 12),
        ([NAN, 5, NAN], {"mode": "max", "save_top_k": 3}, [12], 12),
        ([NAN, NAN], {}, [], None),
        ([NAN, 5, 4], {"save_top_k": -1}, [6, 12, 18], 18),
        ([INF, 5], {"save_top_k": 2}, [6, 12], 12),
        ([-INF, 5], {"mode": "max"}, [12], 12),
        ([5, 4, 3, 2], {"every_n_epochs": 2, "save_top_k": -1}, [12, 24], 24),
    ],
)
def test_the_best_are_kept(tmp_path, values, options, kept, best):
    callback = run_on(tmp_path / "best", values, **options)
    assert sorted(steps_of(tmp_path / "best").values()) == kept
    if best is None:
        assert (callback.best_model_path, callback.best_model_score) == ("", None)
    else:
        assert callback.best_model_path == str(tmp_path / "best" / f"step={best}.ckpt")
        assert callback.best_model_score == values[best // 6 - 1]
    files = {str(tmp_path / "best" / f"step={step}.ckpt") for step in kept}
    assert set(callback.best_k_models) == files


@pytest.mark.parametrize(
    ("values", "k", "name"),
    [
        ([5, 4], 3, ""),
        ([5, 4, 6], 2, "step=6.ckpt"),
        ([5, 5], 2, "step=12.ckpt"),  # of equal scores, the newer file is worse
    ],
)
def test_the_kth_best_is_the_one_that_goes_next(tmp_path, values, k, name):
    callback = run_on(tmp_path, values, save_top_k=k)
    assert callback.kth_best_model_path == (str(tmp_path / name) if name else "")


@pytest.mark.parametrize(("k", "kept"), [(1, [18]), (-1, [6, 12, 18])])
def test_without_a_metric_the_newest_is_the_best(tmp_path, k, kept):
    callback = run_on(tmp_path, [5, 4, 6], monitor=None, save_top_k=k)
    assert list(steps_of(tmp_path).values()) == sorted(kept, key=str)
    assert callback.best_model_path == str(tmp_path / "step=18.ckpt")
    assert callback.best_model_score is None


@pytest.mark.parametrize(
    ("monitor", "every", "kept"),
    [("step", {"every_n_train_steps": 4}, [12, 16]), ("epoch", {}, [12, 18])],
)
def test_the_newest_are_kept(tmp_path, monitor, every, kept):
    """Source: ``monitor="step"`` in the examples of Lightning's ``ModelCheckpoint``."""
    callback = run_on(tmp_path, [5, 4, 6], monitor=monitor, mode="max", save_top_k=2, **every)
    assert sorted(steps_of(tmp_path).values()) == kept
    assert callback.best_model_path == str(tmp_path / f"step={kept[-1]}.ckpt")


def test_last_ckpt_is_saved_at_every_check_even_if_the_score_is_not_among_the_best(tmp_path):
    callback = run_on(tmp_path / "both", [5, 4, 6], save_last=True)
    assert steps_of(tmp_path / "both") == {"last.ckpt": 18, "step=12.ckpt": 12}
    assert callback.last_model_path == str(tmp_path / "both" / "last.ckpt")
    callback = run_on(tmp_path / "alone", [5, 4, 6], save_last=True, save_top_k=0)
    assert steps_of(tmp_path / "alone") == {"last.ckpt": 18}
    assert callback.best_model_path == ""


# --- when it checks -------------------------------------------------------------------------------


def test_within_an_epoch_it_saves_after_the_validation_with_its_metric(tmp_path):
    callback = run_on(tmp_path, [5, 3, 4, 2], every=3, max_epochs=2, save_top_k=-1)
    assert sorted(steps_of(tmp_path).values()) == [3, 6, 9, 12]
    assert list(callback.best_k_models.values()) == [5, 3, 4, 2]
    assert callback.best_model_score == 2


def test_it_checks_after_validations_of_every_second_epoch(tmp_path):
    run_on(tmp_path, [5, 4], check_val_every_n_epoch=2, max_epochs=4, save_top_k=-1)
    assert sorted(steps_of(tmp_path).values()) == [12, 24]


def test_after_each_epoch_on_request_also_with_validations_within(tmp_path):
    callback = run_on(
        tmp_path, [5, 3, 4, 2], every=3, max_epochs=2, save_top_k=-1, save_on_train_epoch_end=True
    )
    assert sorted(steps_of(tmp_path).values()) == [6, 12]
    assert list(callback.best_k_models.values()) == [3, 2]


def test_the_sanity_check_does_not_count(tmp_path):
    options = {"num_sanity_val_steps": 1, "max_epochs": 1, "mode": "max"}
    callback = run_on(tmp_path, [5, 4, 3], every=3, **options)
    assert callback.best_model_score == 5
    assert 0 not in steps_of(tmp_path).values()


def test_training_metrics_count_after_the_epoch(tmp_path):
    def logs(module, batch, batch_idx):
        module.log("train", 9.0 - module.current_epoch, on_step=False, on_epoch=True)

    callback = run_on(tmp_path, [1, 1, 1], train=logs, monitor="train")
    assert callback.best_model_score == 7.0


@pytest.mark.parametrize(("name", "flush"), [("loss", 4), ("loss_step", 50)])
def test_by_steps_a_file_has_the_score_of_its_step(tmp_path, name, flush):
    losses = [5.0, 3.0, 4.0, 1.0, 2.0, 6.0]

    def logs(module, batch, batch_idx):
        module.log("loss", losses[batch_idx], on_step=True, on_epoch=name == "loss_step")

    options = {"train": logs, "monitor": name, "every_n_train_steps": 1, "log_every_n_steps": flush}
    callback = run_on(tmp_path / "all", [1], save_top_k=-1, **options)
    assert callback.best_k_models == {
        str(tmp_path / "all" / f"step={i}.ckpt"): loss for i, loss in enumerate(losses, start=1)
    }
    best = run_on(tmp_path / "best", [1], filename="{step}-{loss:.0f}", **options)
    assert steps_of(tmp_path / "best") == {"step=4-loss=1.ckpt": 4}
    assert best.best_model_score == 1.0


def test_by_steps_a_validations_score_belongs_to_the_weights_that_were_validated(tmp_path):
    """It checks every step; validations run after steps 2, 4 and 6."""
    options = {"max_epochs": 1, "every_n_train_steps": 1, "save_top_k": -1}
    callback = run_on(tmp_path, [5, 3, 4], every=2, **options)
    scores = {2: 5, 4: 3, 6: 4}
    files = {str(tmp_path / f"step={step}.ckpt"): score for step, score in scores.items()}
    assert callback.best_k_models == files


def test_by_steps_a_metric_logged_at_other_steps_keeps_nothing_and_warns(tmp_path):
    def logs(module, batch, batch_idx):
        if batch_idx % 3 == 0:  # in steps 1, 4, 7 and so on
            module.log("loss", 1.0)

    message = "'loss', which was logged after step 4, and it checks every 3 steps. Fix: log it in"
    with pytest.warns(UserWarning, match=message):
        callback = run_on(tmp_path, [1], train=logs, monitor="loss", every_n_train_steps=3)
    assert callback.best_model_path == ""
    at_some = run_on(tmp_path, [1], train=logs, monitor="loss", every_n_train_steps=2)
    assert at_some.best_model_path == str(tmp_path / "step=4.ckpt")


def test_an_epoch_without_a_value_is_not_scored(tmp_path):
    options = {"check_val_every_n_epoch": 2, "max_epochs": 4, "save_on_train_epoch_end": True}
    callback = run_on(tmp_path, [5, 4], save_top_k=-1, **options)
    files = {str(tmp_path / "step=12.ckpt"): 5, str(tmp_path / "step=24.ckpt"): 4}
    assert callback.best_k_models == files


def test_by_steps_a_metric_that_is_not_yet_logged_gives_one_warning(tmp_path):
    message = r"monitors 'metric', which was not logged.*Until it is"
    with pytest.warns(UserWarning, match=message) as warned:
        run_on(tmp_path, [1, 1], every_n_train_steps=2, save_top_k=-1, save_last=True)
    assert len([one for one in warned if "Until it is" in str(one.message)]) == 1
    assert steps_of(tmp_path) == {"last.ckpt": 12, "step=12.ckpt": 12, "step=6.ckpt": 6}


def test_only_fit_saves(tmp_path):
    one = trainer(plugins=[ModelCheckpoint(dirpath=tmp_path)])
    one.validate(EvalNet(), loader())
    one.test(EvalNet(), loader())
    assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_nothing_and_needs_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for callback in (ModelCheckpoint("val_loss"), ModelCheckpoint("val_loss", dirpath="there")):
        fit(EvalNet(), val=loader(), fast_dev_run=True, plugins=[callback])
    assert not list(tmp_path.iterdir())


def test_a_run_too_short_for_a_check_gives_a_warning(tmp_path):
    message = "saved nothing: every_n_epochs=5, and the run had 2 epochs"
    with pytest.warns(UserWarning, match=message):
        run_on(tmp_path, [1, 1], every_n_epochs=5)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filename", "options", "name"),
    [
        (None, {}, "epoch=0-step=6.ckpt"),
        ("{epoch:02d}-{metric:.2f}", {}, "epoch=00-metric=0.25.ckpt"),
        ("{epoch:02d}-{metric:.2f}", {"auto_insert_metric_name": False}, "00-0.25.ckpt"),
        ("digits-{a/b}", {}, "digits-a_b=0.5.ckpt"),
        ("sub/{step}.ckpt", {}, "sub/step=6.ckpt"),
        ("plain", {}, "plain.ckpt"),
    ],
)
def test_names(tmp_path, filename, options, name):
    def logs(module, batch, batch_idx):
        module.log("a/b", 0.5, on_step=False, on_epoch=True)

    callback = run_on(tmp_path, [0.25], train=logs, filename=filename, **options)
    assert callback.best_model_path == str(tmp_path / name)
    assert (tmp_path / name).is_file()


def test_existing_files_are_never_overwritten(tmp_path):
    names = {"step=6.ckpt", "step=6-v1.ckpt", "last.ckpt"}
    for name in names:
        (tmp_path / name).write_text("mine")
    callback = run_on(tmp_path, [5, 4], save_top_k=2, save_last=True)
    assert {path.name for path in tmp_path.iterdir() if path.read_bytes() == b"mine"} == names
    assert callback.kth_best_model_path == str(tmp_path / "step=6-v2.ckpt")
    assert callback.last_model_path == str(tmp_path / "last-v1.ckpt")
    assert torch.load(callback.last_model_path, weights_only=True)["step"] == 12


def test_files_of_one_name_get_versions_and_the_dropped_file_is_replaced(tmp_path):
    callback = run_on(tmp_path, [5, 4, 3], save_top_k=2, filename="same")
    assert steps_of(tmp_path) == {"same.ckpt": 18, "same-v1.ckpt": 12}
    files = {str(tmp_path / "same-v1.ckpt"): 4, str(tmp_path / "same.ckpt"): 3}
    assert callback.best_k_models == files


def test_the_default_folder_is_in_the_runs_folder(tmp_path):
    options = {"model_checkpoint": {"monitor": "val_loss"}}
    plugins = ["model_checkpoint"]
    fit(EvalNet(), val=loader(), output=tmp_path / "run", plugins=plugins, plugin_options=options)
    assert (tmp_path / "run" / "checkpoints" / "epoch=0-step=6.ckpt").is_file()
    assert (tmp_path / "run" / "last.ckpt").is_file()


# --- files during and after a save ----------------------------------------------------------------


class Watches:
    """Record the name of each saved checkpoint and the content of the folder."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    @hookimpl
    def on_checkpoint_saved(self, path):
        assert "model" in torch.load(path, weights_only=True)
        self.seen.append((path.name, sorted(file.name for file in self.folder.iterdir())))


def test_the_old_file_is_deleted_only_after_the_new_one_is_complete(tmp_path):
    watches = Watches(tmp_path)
    run_on(tmp_path, [3, 2], more=[watches])
    assert watches.seen == [
        ("step=6.ckpt", ["step=6.ckpt"]),
        ("step=12.ckpt", ["step=12.ckpt", "step=6.ckpt"]),
    ]
    assert list(steps_of(tmp_path)) == ["step=12.ckpt"]


def test_the_last_is_a_link_to_the_file_of_its_check_if_that_is_kept(tmp_path):
    last = tmp_path / "last.ckpt"
    watches = Watches(tmp_path)
    run_on(tmp_path, [5, 4, 6], save_last="link", more=[watches])
    first, second = ["step=6.ckpt", "last.ckpt"], ["step=12.ckpt", "last.ckpt"]
    assert [name for name, _ in watches.seen] == [*first, *second, "last.ckpt"]
    assert not last.is_symlink()  # the last score was not among the best
    assert steps_of(tmp_path) == {"step=12.ckpt": 12, "last.ckpt": 18}
    run_on(tmp_path / "better", [5, 4], save_last="link", save_top_k=2)
    assert os.readlink(tmp_path / "better" / "last.ckpt") == "step=12.ckpt"
    assert steps_of(tmp_path / "better") == {"step=6.ckpt": 6, "step=12.ckpt": 12, "last.ckpt": 12}


def test_where_links_are_impossible_the_last_is_a_file_with_a_warning(tmp_path, monkeypatch):
    def refuse(path, target):
        raise OSError("not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.warns(UserWarning, match=r"last\.ckpt cannot be a link \(not permitted\)"):
        run_on(tmp_path, [5], save_last="link")
    assert steps_of(tmp_path) == {"step=6.ckpt": 6, "last.ckpt": 6}


def test_the_source_of_a_resume_stays(tmp_path):
    class Stops(EvalNet):
        def on_train_epoch_start(self):
            if self.trainer.current_epoch == 3:
                raise KeyError("stop")

    def train(module, epochs, path=None):
        plugins = [ModelCheckpoint(filename="{epoch}", save_last="link")]
        one = trainer(max_epochs=epochs, output=tmp_path, plugins=plugins, strategy=ThreadRanks(2))
        one.fit(module, loader(), ckpt_path=path)

    source = tmp_path / "checkpoints" / "epoch=1.ckpt"
    train(EvalNet(), 2)
    for _ in range(2):  # the same command resumes again
        with pytest.raises(KeyError, match="stop"):
            train(Stops(), 5, source)
        assert source.exists()
    train(EvalNet(), 5, "last")
    train(EvalNet(), 6, tmp_path / "checkpoints" / "epoch=4.ckpt")
    assert source.exists()
    assert (tmp_path / "checkpoints" / "epoch=4.ckpt").exists()


def test_a_save_that_fails_leaves_the_best_as_it_was(tmp_path):
    class Full:
        calls = 0

        @hookimpl(wrapper=True)
        def save_checkpoint(self):
            self.calls += 1
            if self.calls == 2:
                raise OSError("no space left on device")
            return (yield)

    class Keeps:
        @hookimpl
        def on_exception(self, run):
            self.callback = run.module.trainer.checkpoint_callback

    keeps = Keeps()
    with pytest.raises(OSError, match="no space"):
        run_on(tmp_path, [3, 2], more=[Full(), keeps])
    assert list(steps_of(tmp_path)) == ["step=6.ckpt"]
    best = keeps.callback
    assert (best.best_model_path, best.best_model_score) == (str(tmp_path / "step=6.ckpt"), 3.0)


def test_a_file_that_the_user_deleted_causes_no_error(tmp_path):
    class Deletes:
        @hookimpl
        def on_epoch_start(self, run):
            for path in tmp_path.glob("step=*"):
                path.unlink()

    run_on(tmp_path, [3, 2], more=[Deletes()])
    assert list(steps_of(tmp_path)) == ["step=12.ckpt"]


def test_a_second_fit_starts_from_scratch_and_leaves_the_files_of_the_first(tmp_path):
    one = ModelCheckpoint("metric", dirpath=tmp_path, filename="{step}")
    left = [3.0, 5.0]
    module = Logging(validate=lambda self, batch, i: self.log("metric", left.pop(0)))
    again = trainer(plugins=[one])
    for _ in range(2):
        again.fit(module, loader(), loader(4))
    assert one.best_k_models == {str(tmp_path / "step=6-v1.ckpt"): 5.0}
    assert {path.name for path in tmp_path.iterdir()} == {"step=6.ckpt", "step=6-v1.ckpt"}


def test_its_state_can_be_loaded_in_another_process(tmp_path):
    one = run_on(tmp_path, [5, 4, 6], save_top_k=2, save_last=True)
    other = ModelCheckpoint("metric", save_top_k=2, dirpath=tmp_path)
    other.load_state_dict(one.state_dict())
    for name in ("best_model_path", "best_model_score", "last_model_path", "best_k_models"):
        assert getattr(other, name) == getattr(one, name)
    assert other.kth_best_model_path == one.kth_best_model_path
    assert type(one.best_model_score) is float
    one.state_dict()["best_k_models"].clear()
    assert len(one.best_k_models) == 2


class Restarts:
    """Takes the state of step 10 in memory, fails in step 16, and then begins with that state."""

    state: bytes = b""

    @hookimpl(wrapper=True)
    def setup_device(self, run):
        if self.state:
            run.loop.memory_checkpoint = pickle.loads(self.state)
            run.plan = replace(run.plan, resumes=True)
        return (yield)

    @hookimpl
    def on_step_end(self, run):
        if run.step == 10:
            self.state = pickle.dumps(run.checkpoint(run.epoch))
        if run.step == 16 and run.loop.memory_checkpoint is None:
            raise KeyError("killed")


def test_a_run_that_repeats_steps_has_the_files_of_one_that_does_not(tmp_path):
    """Later checks have deleted files that the state in memory lists."""

    def train(name, plugins):
        best = ModelCheckpoint("metric", dirpath=tmp_path / name, filename="{epoch}", save_top_k=2)
        net = Logging(validate=lambda net, *_: net.log("metric", -float(net.trainer.global_step)))
        options = {"max_epochs": -1, "max_steps": 17, "val_check_interval": 0.5}
        fit(net, val=loader(4), plugins=[best, *plugins], **options)
        return best

    quiet, restarts = train("quiet", []), Restarts()
    with pytest.raises(KeyError):
        train("killed", [restarts])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        killed = train("killed", [restarts])
    assert [Path(name).name for name in quiet.best_k_models] == ["epoch=1-v1.ckpt", "epoch=2.ckpt"]
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "quiet")
    assert Path(killed.best_model_path).name == Path(quiet.best_model_path).name


def test_verbose_prints_each_saved_file(tmp_path, capsys):
    run_on(tmp_path, [5, 6], verbose=True)
    assert capsys.readouterr().err.count("model_checkpoint: saved ") == 1


# --- errors of a run ------------------------------------------------------------------------------

NEAREST = r"'metrik', which was not logged. Did you mean 'metric'\?"
METRIK = {"monitor": "metrik", "max_epochs": 1}


@pytest.mark.filterwarnings("ignore:.*Until it is")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (METRIK, rf"geartrain-callbacks\[model_checkpoint\].*{NEAREST} Logged: metric."),
        ({**METRIK, "every_n_train_steps": 2}, NEAREST),
        ({"filename": "{metrik}"}, f"has {NEAREST}"),
        (
            {"filename": "{step:/>3}", "auto_insert_metric_name": False},
            r"model_checkpoint\]: the name '//6' leads out of the folder",
        ),
        (
            {"dirpath": f"{__file__}/in"},
            r"py/in/step=6\.ckpt could not be written: .*Fix: use another output",
        ),
    ],
)
def test_a_check_that_fails_ends_the_run(tmp_path, options, message):
    with pytest.raises(TrainingError, match=message):
        run_on(tmp_path, [5, 5], **options)
