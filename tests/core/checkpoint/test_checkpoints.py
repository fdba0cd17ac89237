"""The checkpoint that ckpt_path= means, and evaluation of the fitted model."""

import os
import shutil

import pytest
import torch
from small_models import EvalNet, Pretend, assert_equal, differ, fit, loader, trainer

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import ModelCheckpoint

METHODS = ["validate", "test", "predict"]


class Worse(EvalNet):
    """Its metric gets worse with each epoch: the best is the first epoch's."""

    def validation_step(self, batch, batch_idx):
        self.log("rising", float(self.current_epoch))


@pytest.fixture
def fitted(tmp_path):
    """Return a trainer, its module after two epochs, and the weights of its best and its last."""
    module, keep = Worse(), ModelCheckpoint("rising")
    one = fit(module, val=loader(), output=tmp_path / "run", max_epochs=2, plugins=[keep])
    best = torch.load(keep.best_model_path, weights_only=True)["model"]
    return one, module, best, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("method", METHODS)
def test_best_and_last_without_a_model(fitted, method):
    one, module, best, last = fitted
    for which, weights in (("best", best), ("last", last)):
        result = getattr(one, method)(dataloaders=loader(), ckpt_path=which)
        assert_equal(module, weights)
        if method == "validate":  # the file has its epoch
            assert result == [{"rising": 2.0}]


def test_best_into_a_model_that_is_given(fitted):
    one, module, best, last = fitted
    other = Worse()
    one.test(other, loader(), ckpt_path="best")
    assert_equal(other, best)
    assert_equal(module, last)


def test_fit_may_start_from_the_best(fitted):
    one, _, best, _ = fitted

    class Looks(Worse):
        def on_fit_start(self):
            assert_equal(self, best)

    one.fit(Looks(), loader(), loader(), checkpoint="best")


def test_without_a_path_the_best_is_read_with_a_warning(fitted):
    one, module, best, _ = fitted
    with pytest.warns(UserWarning, match="test without a model reads the best weights"):
        one.test(dataloaders=loader())
    assert_equal(module, best)


def test_a_model_that_is_given_keeps_its_weights(fitted, recwarn):
    one, module, _, last = fitted
    one.test(module, loader())
    assert_equal(module, last)
    assert not any("best weights" in str(one.message) for one in recwarn)


def test_the_fitted_model_and_its_data_are_those_of_the_last_run(recwarn):
    class Data(gt.DataModule):
        def train_dataloader(self):
            return loader()

        predict_dataloader = train_dataloader

    module, one = EvalNet(), trainer()
    one.fit(module, datamodule=Data())
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    assert len(one.predict()) == 6
    assert_equal(module, expected)
    assert len(one.predict(dataloaders=loader(8))) == 2
    assert not any("best weights" in str(one.message) for one in recwarn)


def test_no_model_and_none_before():
    with pytest.raises(UsageError, match=r"no model to test.*Fix"):
        trainer().test(dataloaders=loader())


def test_checkpoint_callback_is_the_first_one(tmp_path):
    first, second = ModelCheckpoint(dirpath=tmp_path), ModelCheckpoint(dirpath=tmp_path)
    assert trainer(callbacks=[first, second]).checkpoint_callback is first
    assert trainer().checkpoint_callback is None


# --- last -----------------------------------------------------------------------------------------


def test_last_is_the_newest_of_those_that_were_saved(tmp_path):
    module, own = EvalNet(), ModelCheckpoint(save_last=True, every_n_train_steps=4)
    one = fit(module, output=tmp_path / "run", plugins=[own])
    of_run = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["model"]
    of_own = torch.load(own.last_model_path, weights_only=True)["model"]
    assert differ(of_run, of_own)
    one.test(dataloaders=loader(), ckpt_path="last")
    assert_equal(module, of_run)
    os.utime(tmp_path / "run" / "last.ckpt", (0, 0))
    one.test(dataloaders=loader(), ckpt_path="last")
    assert_equal(module, of_own)


# --- errors ---------------------------------------------------------------------------------------


def refused(words, one, which, **options):
    module = EvalNet()
    with pytest.raises(UsageError, match=words):
        one.test(module, loader(), ckpt_path=which, **options)
    assert module.seen == []


def test_best_of_a_trainer_that_keeps_none(tmp_path):
    words = r"has saved no checkpoint that could be the best\. Fix: .*plugins="
    refused(words, fit(EvalNet()), "best")
    refused(words, trainer(plugins=[ModelCheckpoint(dirpath=tmp_path)]), "best")


def test_best_of_several(tmp_path):
    two = [
        ModelCheckpoint("val_loss", dirpath=tmp_path / "a"),
        ModelCheckpoint("val_loss", mode="max", dirpath=tmp_path / "b"),
    ]
    one = fit(EvalNet(), val=loader(), plugins=two)
    refused(
        r"'best' may be .*a/.*\.ckpt or .*b/.*\.ckpt\. Fix: give one of these files", one, "best"
    )
    one.test(EvalNet(), loader(), ckpt_path=two[1].best_model_path)


def test_a_plugin_may_know_the_best_and_the_last(tmp_path, fitted):
    class Knows:
        @hookimpl
        def find_checkpoint(self, which, output):
            return [] if which == "any" else [tmp_path / f"{which}.ckpt"]

    first, *_ = fitted
    for which in ("best", "last"):
        shutil.copy(first.checkpoint_callback.best_model_path, tmp_path / f"{which}.ckpt")
        one = trainer(plugins=[Knows()])
        one.test(EvalNet(), loader(), ckpt_path=which)
    (tmp_path / "best.ckpt").unlink()
    refused(
        r"the best checkpoint, .*best\.ckpt, no longer exists", trainer(plugins=[Knows()]), "best"
    )


def test_last_if_none_was_saved(tmp_path):
    refused("saved no last checkpoint.*save_last=True", fit(EvalNet()), "last")
    refused("saved no last checkpoint", trainer(output=tmp_path / "run"), "last")


def test_a_best_that_was_deleted(fitted):
    one, *_ = fitted
    os.unlink(one.checkpoint_callback.best_model_path)
    refused(
        r"the best checkpoint, .*epoch=0-step=6\.ckpt, no longer exists\. Fix: pass an existing",
        one,
        "best",
    )


def test_a_folder_names_its_files(fitted, tmp_path):
    refused(
        r"run is a folder, not a checkpoint\. "
        r"Fix: use one of its files: checkpoints/epoch=0-step=6\.ckpt, last\.ckpt",
        fitted[0],
        tmp_path / "run",
    )
    refused("is a folder, not a checkpoint", trainer(), tmp_path)


def test_ranks_that_would_read_different_files(tmp_path):
    """Rank 1 of two; rank 0, which the broadcast imitates, reads another file."""
    path = tmp_path / "b.ckpt"
    torch.save({"model": EvalNet().state_dict()}, path)

    class Second(Pretend):
        @gt.hookimpl
        def broadcast(self, obj):
            if isinstance(obj, tuple):  # the settings that must be equal, and the folder
                return {**obj[0], "the checkpoint": "a.ckpt"}, obj[1]
            return obj

    with pytest.raises(
        TrainingError,
        match="differs from rank 0 in the checkpoint: 'a.ckpt' there and 'b.ckpt' here".replace(
            ".", r"\."
        ),
    ):
        trainer(strategy=Second(), devices=2).test(EvalNet(), loader(), ckpt_path=path)


class Saves:
    """Owns save_checkpoint, and leaves load_checkpoint to core."""

    replaces = frozenset({"save_checkpoint"})

    @hookimpl
    def save_checkpoint(self, state, path):
        torch.save(state, path)


def test_a_checkpoint_of_a_plugin_needs_that_plugin(tmp_path):
    net, other = EvalNet(), EvalNet()
    fit(net, output=tmp_path, plugins=[Saves()])
    trainer(plugins=[Saves()]).test(other, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert_equal(net, other)
    with pytest.raises(
        TrainingError,
        match=r"last\.ckpt was written by the plugin Saves, which .*not have\. Fix: select Saves",
    ):
        trainer().test(EvalNet(), loader(), ckpt_path=tmp_path / "last.ckpt")


class Halves:
    """Saves weights that are half as large, and doubles what it loads."""

    @hookimpl(wrapper=True)
    def model_state(self):
        state = yield
        return {name: value / 2 for name, value in state.items()}

    @hookimpl(wrapper=True)
    def load_model_state(self, state):
        for name, value in state.items():
            state[name] = value * 2
        return (yield)


def test_a_plugin_may_change_the_weights_that_are_saved_and_loaded(tmp_path):
    module, other = EvalNet(), EvalNet()
    fit(module, plugins=[Halves()], output=tmp_path)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["model"]
    for name, value in module.state_dict().items():
        assert torch.equal(saved[name], value / 2)
    one = trainer(plugins=[Halves()])
    one.validate(other, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert_equal(other.state_dict(), module.state_dict())
