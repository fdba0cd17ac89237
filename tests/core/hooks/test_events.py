"""Events of the loop for plugins, and the methods of modules and callbacks beside them."""

import pytest
from small_models import EvalNet, fit, loader, trainer

from geartrain import TrainingError, hookimpl
from geartrain.callbacks import Callback


class Events:
    """Notes every event of a fit, with its arguments."""

    def __init__(self):
        self.fired = []

    def note(self, name, *values):
        self.fired.append(" ".join(map(str, (name, *values))))

    @hookimpl
    def on_fit_start(self):
        self.note("fit_start")

    @hookimpl
    def on_sanity_check_start(self):
        self.note("sanity_check_start")

    @hookimpl
    def on_sanity_check_end(self):
        self.note("sanity_check_end")

    @hookimpl
    def on_train_start(self):
        self.note("train_start")

    @hookimpl
    def on_epoch_start(self, run):
        self.note("epoch_start", run.epoch)

    @hookimpl
    def on_train_batch_start(self, batch, batch_idx):
        self.note("batch_start", batch_idx, len(batch))

    @hookimpl
    def on_before_zero_grad(self, optimizer):
        self.note("before_zero_grad", type(optimizer).__name__)

    @hookimpl
    def on_before_backward(self, loss):
        self.note("before_backward", loss.dim())

    @hookimpl
    def on_after_backward(self, run):
        self.note("after_backward", next(run.module.parameters()).grad is not None)

    @hookimpl
    def on_before_optimizer_step(self, optimizer):
        self.note("before_optimizer_step", type(optimizer).__name__)

    @hookimpl
    def on_train_batch_end(self, outputs, batch_idx):
        self.note("batch_end", batch_idx, outputs.dim())

    @hookimpl
    def on_step_end(self, run):
        self.note("step_end", run.step)

    @hookimpl
    def on_validation_start(self, run):
        self.note(run.stage)

    @hookimpl
    def on_validation_epoch_start(self):
        self.note("validation_epoch_start")

    @hookimpl
    def on_validation_batch_start(self, batch_idx, dataloader_idx):
        self.note("validation_batch_start", batch_idx, dataloader_idx)

    @hookimpl
    def on_validation_batch_end(self, outputs, batch_idx, dataloader_idx):
        self.note("validation_batch_end", outputs, batch_idx, dataloader_idx)

    @hookimpl
    def on_validation_epoch_end(self, run):
        run.log("from_a_plugin", 2.0)
        self.note("validation_epoch_end")

    @hookimpl
    def on_validation_end(self, run):
        self.note("validation_end", run.metrics["from_a_plugin"])

    @hookimpl
    def on_train_epoch_end(self, run):
        run.log("of_the_epoch", 3.0)
        self.note("train_epoch_end")

    @hookimpl
    def on_epoch_end(self, run):
        self.note("epoch_end", run.metrics["of_the_epoch"])

    @hookimpl
    def on_train_end(self):
        self.note("train_end")

    @hookimpl
    def on_fit_end(self):
        self.note("fit_end")


_EVALUATION = """
    validation_epoch_start
    validation_batch_start 0 0
    validation_batch_end None 0 0
    validation_epoch_end
    validation_end 2.0
"""


def test_a_plugin_gets_every_event_in_order():
    plugin = Events()
    fit(
        EvalNet(),
        loader(8),
        loader(4),
        plugins=[plugin],
        accumulate_grad_batches=2,
        num_sanity_val_steps=1,
    )
    expected = f"""
        fit_start
        sanity_check_start
        sanity_check
        {_EVALUATION}
        sanity_check_end
        train_start
        epoch_start 0
        before_zero_grad SGD
        batch_start 0 2
        before_backward 0
        after_backward True
        batch_end 0 0
        batch_start 1 2
        before_backward 0
        after_backward True
        before_optimizer_step SGD
        batch_end 1 0
        step_end 1
        validate
        {_EVALUATION}
        train_epoch_end
        epoch_end 3.0
        train_end
        fit_end
    """
    assert plugin.fired == [line.strip() for line in expected.splitlines() if line.strip()]


def test_plugins_come_before_callbacks_and_these_before_the_module():
    order = []

    class Plugin:
        @hookimpl
        def on_train_batch_end(self):
            order.append("plugin")

    class Called(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            order.append("callback")

    class Net(EvalNet):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            order.append("module")

    fit(Net(), loader(4), callbacks=[Called()], plugins=[Plugin()])
    assert order == ["plugin", "callback", "module"]


def test_minus_one_ends_the_epoch():
    class Stops:
        @hookimpl
        def on_train_batch_start(self, batch_idx):
            return -1 if batch_idx == 1 else None

    assert fit(EvalNet(), loader(12), plugins=[Stops()], max_epochs=2).global_step == 2


def test_an_event_that_raises_names_its_plugin():
    class Raises:
        @hookimpl
        def on_train_batch_end(self):
            raise TrainingError("no")

    one = trainer(plugins=[Raises()])
    with pytest.raises(TrainingError, match="no") as caught:
        one.fit(EvalNet(), loader(4))
    assert "raised in hook 'on_train_batch_end' of Raises" in "\n".join(caught.value.__notes__)
