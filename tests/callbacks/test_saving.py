"""``trainer.save_checkpoint``: in a run, after one, on each rank; and ``trainer.ckpt_path``."""

from contextlib import nullcontext

import pytest
import torch
from small_models import EvalNet, Net, assert_equal, fit, loader, trainer
from threads import on_threads

import geartrain as gt
from geartrain.callbacks import EMA, Callback, ModelCheckpoint


def contents(path):
    return torch.load(path, weights_only=True)


class SavesAfter(Callback):
    """Saves after a batch, on every rank."""

    def __init__(self, file, batch_idx, **options):
        self.file, self.batch_idx, self.options = file, batch_idx, options

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (0, self.batch_idx):
            trainer.save_checkpoint(self.file, **self.options)


def test_a_fit_resumes_from_a_file_saved_after_it(tmp_path):
    whole, stopped = Net(), Net()
    stopped.load_state_dict(whole.state_dict())
    shuffled = {"train": loader(shuffle=True)}
    fit(whole, max_epochs=2, seed=3, **shuffled)
    fit(stopped, seed=3, **shuffled).save_checkpoint(tmp_path / "a.ckpt")
    rest = Net()
    again = trainer(max_epochs=2, seed=3)
    again.fit(rest, shuffled["train"], ckpt_path=tmp_path / "a.ckpt")
    assert_equal(rest, whole)
    assert (again.current_epoch, again.global_step) == (2, 12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fit_resumes_from_a_file_saved_in_it(tmp_path, ranks):
    def train(module, *callbacks, **start):
        options = {"max_epochs": 1, "callbacks": list(callbacks), "enable_progress_bar": False}
        runner = on_threads(2, **options)[0] if ranks == 2 else trainer(**options)
        runner.fit(module, loader(batch_size=2), **start)
        return module

    whole = train(Net(), SavesAfter(tmp_path / "a.ckpt", 2))
    assert contents(tmp_path / "a.ckpt")["step"] == 3
    assert_equal(train(Net(), ckpt_path=tmp_path / "a.ckpt"), whole)


@pytest.mark.parametrize("batch_idx", [1, 2, 3])
def test_within_accumulated_batches_the_file_has_the_steps_that_are_done(tmp_path, batch_idx):
    whole = Net()
    saves = SavesAfter(tmp_path / "a.ckpt", batch_idx)
    within = batch_idx == 2  # the batch is trained on again: a batch norm would see it twice
    with pytest.warns(match="is saved within a step") if within else nullcontext():
        fit(whole, callbacks=[saves], accumulate_grad_batches=2)
    assert contents(tmp_path / "a.ckpt")["step"] == (batch_idx + 1) // 2
    rest = Net()
    trainer(accumulate_grad_batches=2).fit(rest, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_equal(rest, whole)


def test_in_manual_optimisation_the_file_has_the_batch_too(tmp_path):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    whole, rest = Manual(), Manual()
    fit(whole, callbacks=[SavesAfter(tmp_path / "a.ckpt", 2)])
    trainer().fit(rest, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_equal(rest, whole)


def test_after_a_fit_of_several_ranks_rank_0_writes_what_they_can_resume_from(tmp_path):
    runner, strategy = on_threads(2, max_epochs=1, enable_progress_bar=False)
    runner.fit(Net(), loader(batch_size=2))
    rank_1 = strategy.runs[1].trainer
    rank_1.save_checkpoint(tmp_path / "rank-1.ckpt")  # does not wait, and does not write
    assert not (tmp_path / "rank-1.ckpt").exists()
    runner.save_checkpoint(tmp_path / "a.ckpt")
    again, _ = on_threads(2, max_epochs=2, enable_progress_bar=False)
    again.fit(Net(), loader(batch_size=2), ckpt_path=tmp_path / "a.ckpt")
    assert (again.current_epoch, again.global_step) == (2, 12)


@pytest.mark.parametrize("inside", [True, False])
def test_weights_alone_make_the_module_but_resume_no_fit(tmp_path, inside):
    file, module = tmp_path / "weights.ckpt", Net()
    saves = [SavesAfter(file, 1, weights_only=True)] if inside else []
    runner = fit(module, callbacks=saves)
    if not inside:
        runner.save_checkpoint(file, weights_only=True)
        assert_equal(Net.load_from_checkpoint(file), module)
    assert "fit" not in contents(file)
    with pytest.raises(
        gt.TrainingError, match=r"Fix: start from the weights.*--checkpoint.*load_from_checkpoint"
    ):
        trainer(max_epochs=2).fit(Net(), loader(), ckpt_path=file)
    fit_from = trainer()
    fit_from.fit(Net(), loader(), checkpoint=file)
    assert fit_from.ckpt_path == str(file)


def test_after_ema_the_file_has_the_average_and_says_that_it_cannot_resume(tmp_path):
    module = Net()
    runner = fit(module, plugins=[EMA(decay=0.5)])
    with pytest.warns(UserWarning, match="not the state to resume from: ema has replaced the "):
        runner.save_checkpoint(tmp_path / "a.ckpt")
    state = contents(tmp_path / "a.ckpt")
    assert_equal(state["model"], module)
    assert "fit" not in state


def test_weights_alone_of_ema_are_the_average_alone(tmp_path):
    fit(plugins=[EMA(decay=0.5)], callbacks=[SavesAfter(tmp_path / "a", 4, weights_only=True)])
    assert not contents(tmp_path / "a").keys() & {"trained", "average", "fit"}


def test_after_another_command_the_weights_are_saved_with_a_warning(tmp_path):
    runner, module = trainer(), EvalNet()
    runner.test(module, loader())
    with pytest.warns(UserWarning, match="the last run was test. Fix if unmeant: call it in or "):
        runner.save_checkpoint(tmp_path / "a.ckpt")
    assert_equal(contents(tmp_path / "a.ckpt")["model"], module)


def test_an_interrupted_fit_can_be_saved_and_resumed(tmp_path):
    class Interrupts(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 2:
                raise KeyboardInterrupt

    whole, stopped = Net(), Net()
    stopped.load_state_dict(whole.state_dict())
    fit(whole)
    runner = trainer(callbacks=[Interrupts()])
    with pytest.raises(KeyboardInterrupt):
        runner.fit(stopped, loader())
    runner.save_checkpoint(tmp_path / "a.ckpt")
    rest = Net()
    trainer().fit(rest, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_equal(rest, whole)


def test_no_run_and_a_folder_are_errors(tmp_path):
    with pytest.raises(gt.UsageError, match=r"has not run anything\. Fix: "):
        trainer().save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(gt.UsageError, match=r"is a folder\. Fix: name a file in it"):
        fit().save_checkpoint(tmp_path)


def test_ckpt_path_is_the_file_that_the_last_run_loaded(tmp_path):
    best = ModelCheckpoint(dirpath=tmp_path / "best")
    runner = trainer(plugins=[best])
    assert runner.ckpt_path is None
    runner.fit(EvalNet(), loader())
    assert runner.ckpt_path is None
    runner.test(dataloaders=loader(), ckpt_path="best")
    assert runner.ckpt_path == best.best_model_path
    runner.test(EvalNet(), loader())
    assert runner.ckpt_path is None
