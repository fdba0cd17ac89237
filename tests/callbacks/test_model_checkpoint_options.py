"""ModelCheckpoint's save_weights_only, save_on_exception and train_time_interval."""

import threading
import time

import pytest
import torch
from small_models import EvalNet, Net, assert_equal, fit, loader, trainer
from threads import on_threads

import geartrain as gt
from geartrain.callbacks import EMA, Callback, ModelCheckpoint


def contents(path):
    return torch.load(path, weights_only=True)


class Raises(Callback):
    """Raises an error after an optimizer step, on one rank or on all; in a validation if asked."""

    def __init__(self, step, error=None, rank=None, validating=False):
        self.step, self.rank, self.validating = step, rank, validating
        self.error = RuntimeError("a bad sample") if error is None else error

    def _raise(self, trainer):
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank):
            raise self.error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not self.validating:
            self._raise(trainer)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.validating:
            self._raise(trainer)


# --- save_weights_only ----------------------------------------------------------------------------


def test_files_with_weights_only_make_the_module_and_resume_no_fit(tmp_path):
    module, best = Net(), ModelCheckpoint(dirpath=tmp_path, save_weights_only=True, save_last=True)
    runner = fit(module, plugins=[best])
    for file in (best.best_model_path, best.last_model_path):
        assert "fit" not in contents(file)
        assert_equal(Net.load_from_checkpoint(file), module)
        with pytest.raises(gt.TrainingError, match=r"Fix: start from the weights, with fit\("):
            trainer(max_epochs=2).fit(Net(), loader(), ckpt_path=file)
    runner.predict_file = runner.checkpoint_file("last")  # without a folder it is the last one
    assert str(runner.predict_file) == best.last_model_path


def test_with_weights_only_the_run_resumes_from_its_own_last_checkpoint(tmp_path):
    def options():
        saves = ModelCheckpoint(save_weights_only=True, save_last=True, every_n_train_steps=5)
        return {"plugins": [saves], "output": tmp_path}

    fit(**options())
    again = trainer(max_epochs=2, **options())
    again.fit(Net(), loader(), ckpt_path="last")
    assert (again.global_step, again.ckpt_path) == (12, str(tmp_path / "last.ckpt"))


# --- save_on_exception ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("a bad sample"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", [2, 8])
def test_after_an_error_the_fit_resumes_where_it_was(tmp_path, error, step, capsys):
    def options(**more):
        saves = ModelCheckpoint(save_on_exception=True)
        return {"plugins": [saves], "output": tmp_path, "max_epochs": 2, **more}

    whole, stopped, rest = Net(), Net(), Net()
    stopped.load_state_dict(whole.state_dict())
    fit(whole, max_epochs=2)
    with pytest.raises(type(error)):
        fit(stopped, **options(callbacks=[Raises(step, error)]))
    file = tmp_path / "checkpoints" / "exception.ckpt"
    place = f"after {step % 6} batches of epoch {step // 6}"
    line = f"{type(error).__name__} ended the fit. Saved {file}: weights and state {place}."
    assert line in capsys.readouterr().err
    again = trainer(**options())
    again.fit(rest, loader(), ckpt_path="last")
    assert again.ckpt_path == str(file)
    assert_equal(rest, whole)
    assert trainer(**options()).checkpoint_file("last") == tmp_path / "last.ckpt"  # is newer


def test_the_same_trainer_resumes_from_it_without_a_folder_of_the_run(tmp_path):
    runner = trainer(
        callbacks=[Raises(2)], plugins=[ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)]
    )
    with pytest.raises(RuntimeError):
        runner.fit(Net(), loader())
    assert runner.checkpoint_file("last") == tmp_path / "exception.ckpt"


def test_an_error_in_a_validation_is_followed_by_the_whole_validation(tmp_path):
    saves = ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)
    with pytest.raises(RuntimeError):
        fit(EvalNet(), val=loader(8), plugins=[saves], callbacks=[Raises(6, validating=True)])
    assert contents(tmp_path / "exception.ckpt")["fit"]["batch_idx"] == 6
    rest = EvalNet()
    trainer().fit(rest, loader(), loader(8), ckpt_path=tmp_path / "exception.ckpt")
    assert rest.seen == [("validate", 0, 0), ("validate", 1, 0)]


def test_of_several_ranks_rank_0_saves_alone_whichever_failed(tmp_path, capsys):
    def run(module, *callbacks, **start):
        saves = ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)
        runner, _ = on_threads(
            2, max_epochs=1, plugins=[saves], callbacks=list(callbacks), enable_progress_bar=False
        )
        runner.fit(module, loader(batch_size=2), **start)
        return module

    for rank in (1, 0):
        with pytest.raises(RuntimeError, match="a bad sample"):
            run(Net(), Raises(3, rank=rank))
        assert "rank 0's weights and state after 3 batches" in capsys.readouterr().err
        state = contents(tmp_path / "exception.ckpt")
        assert (state["step"], len(state["fit"]["ranks"])) == (3, 2)
        (tmp_path / "exception.ckpt").rename(tmp_path / "copy.ckpt")
    whole = Net()
    whole.load_state_dict(state["model"])
    rest = run(Net(), ckpt_path=tmp_path / "copy.ckpt")
    assert rest.trainer.global_step == 6


def test_nothing_is_saved_before_training_or_with_nan(tmp_path):
    class Spoils(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.layers[0].weight.data[0, 0] = float("nan")

    with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="the weights are NaN"):
        fit(
            Spoils(),
            callbacks=[Raises(1)],
            plugins=[ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)],
        )
    with pytest.raises(RuntimeError):
        fit(
            EvalNet(),
            val=loader(),
            num_sanity_val_steps=1,
            callbacks=[Raises(0, validating=True)],
            plugins=[ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)],
        )
    assert not (tmp_path / "exception.ckpt").exists()


def test_after_an_error_in_validation_ema_has_put_the_trained_weights_back(tmp_path):
    saves = ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)
    with pytest.raises(RuntimeError):
        fit(
            EvalNet(),
            val=loader(8),
            plugins=[EMA(0.9), saves],
            callbacks=[Raises(6, validating=True)],
        )
    state = contents(tmp_path / "exception.ckpt")
    assert not torch.equal(state["trained"]["layers.0.bias"], state["model"]["layers.0.bias"])


# --- train_time_interval --------------------------------------------------------------------------


#: The time that passed on this thread's clock alone, so that ranks' clocks differ.
PASSED = threading.local()


@pytest.fixture
def clock(monkeypatch):
    PASSED.seconds, real = 0.0, time.monotonic
    monkeypatch.setattr(
        "geartrain_callbacks.model_checkpoint.time.monotonic",
        lambda: real() + getattr(PASSED, "seconds", 0.0),
    )


class Passes(Callback):
    """Lets an hour pass in some steps, on rank 0."""

    def __init__(self, *steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero and trainer.global_step + 1 in self.steps:
            PASSED.seconds = getattr(PASSED, "seconds", 0.0) + 3600


@pytest.mark.usefixtures("clock")
def test_by_time_it_saves_at_the_end_of_the_step(tmp_path):
    saves = ModelCheckpoint(
        dirpath=tmp_path, train_time_interval={"minutes": 50}, save_top_k=-1, filename="{step}"
    )
    fit(plugins=[saves], callbacks=[Passes(2, 5)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=2.ckpt", "step=5.ckpt"]


@pytest.mark.usefixtures("clock")
def test_by_time_ranks_agree_at_a_flush(tmp_path):
    saves = ModelCheckpoint(
        dirpath=tmp_path, train_time_interval="00:00:50:00", save_top_k=-1, filename="{step}"
    )
    runner, _ = on_threads(
        2,
        max_epochs=1,
        log_every_n_steps=3,
        plugins=[saves],
        callbacks=[Passes(2)],
        enable_progress_bar=False,
    )
    runner.fit(Net(), loader(batch_size=2))
    assert [path.name for path in tmp_path.iterdir()] == ["step=3.ckpt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_epochs": 2}, "train_time_interval checks by steps, every_n_epochs and"),
        ({"every_n_train_steps": 2}, "every_n_train_steps and train_time_interval are given. Fix"),
        ({"train_time_interval": "soon"}, "train_time_interval='soon' cannot be read. Fix"),
    ],
)
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(gt.UsageError) as caught:
        ModelCheckpoint(**{"train_time_interval": 60, **options})
    assert message in str(caught.value)
