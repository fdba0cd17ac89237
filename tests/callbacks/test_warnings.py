"""Warnings about results that a user would otherwise notice late."""

import pytest
import torch
from small_models import EvalNet, Logging, Net, fit, loader

from geartrain.callbacks import EarlyStopping, ModelCheckpoint


def messages(recwarn):
    return [str(w.message) for w in recwarn]


def test_a_logged_nan_is_named_once(recwarn):
    net = Logging(train=lambda self, batch, i: self.log("loss", float("nan") if i > 1 else 1.0))
    fit(net, max_epochs=2, log_every_n_steps=1)
    found = [m for m in messages(recwarn) if "NaN" in m]
    assert found == ["loss became NaN by step 3. Fix: --plugin nan_guard finds the step"]


def test_a_parameter_without_an_optimizer_is_named(recwarn):
    class Forgets(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.layers[0].parameters(), 0.1)

    fit(Forgets())
    found = [m for m in messages(recwarn) if "in no optimizer" in m]
    assert len(found) == 1
    assert "2 trainable parameters are in no optimizer, such as layers.2.weight. Fix: " in found[0]
    frozen = Forgets()
    frozen.layers[2].requires_grad_(False)
    recwarn.clear()
    fit(frozen)
    assert not [m for m in messages(recwarn) if "in no optimizer" in m]


@pytest.mark.parametrize(
    ("callback", "monitor", "mode", "warns"),
    [
        (EarlyStopping, "val_acc", "min", True),
        (ModelCheckpoint, "val/F1", "min", True),
        (ModelCheckpoint, "val_acc", "max", False),
        (EarlyStopping, "accumulated", "min", False),
        (EarlyStopping, "mapping_loss", "min", False),
    ],
)
def test_the_smallest_accuracy_is_hardly_meant(recwarn, callback, monitor, mode, warns):
    callback(monitor=monitor, mode=mode)
    assert any("looks for the smallest" in m for m in messages(recwarn)) == warns


def test_model_checkpoint_says_that_it_saves_nothing_while_the_metric_is_nan(recwarn, tmp_path):
    class Bad(EvalNet):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float("nan"))

    callback = ModelCheckpoint(monitor="val_loss")
    fit(Bad(), val=loader(), max_epochs=3, callbacks=[callback], output=tmp_path)
    found = [m for m in messages(recwarn) if "saves nothing" in m]
    assert found == ["geartrain-callbacks[model_checkpoint] saves nothing while val_loss is NaN"]
    assert callback.best_model_path == ""
