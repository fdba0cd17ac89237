"""Progress bars that are extended and read as PyTorch Lightning's."""

import pytest
import torch
from small_models import EvalNet, Stream, fit, loader, trainer

from geartrain import UsageError, callbacks
from geartrain.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar


class Screen:
    """A display that keeps the metrics of each drawing."""

    pause = 0.0

    def __init__(self):
        self.drawn = []

    def show(self, counts, metrics):
        self.drawn.append(dict(metrics))

    def end_epoch(self, line, metrics):
        pass

    def stop(self):
        pass


class Logs(EvalNet):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log("hidden", loss)
        return loss


def on_screen(cls, *arguments, train=None, **options):
    """Train with a bar of a class; return the bar and what it drew."""
    screen = Screen()
    shown = type(cls.__name__, (cls,), {"_make_display": lambda self: screen})
    bar = shown(*arguments)
    options = {"enable_progress_bar": True, "log_every_n_steps": 1, **options}
    fit(Logs(), train, loader(8), callbacks=[bar], **options)
    return bar, screen.drawn


@pytest.mark.parametrize("base", [ProgressBar, RichProgressBar, TQDMProgressBar])
def test_a_subclass_reads_the_batches_of_its_run(base):
    class Percent(base):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            total = self.total_train_batches
            self.seen.append((self.trainer is trainer, batch_idx / total, self.is_enabled))

    bar, drawn = on_screen(Percent)
    assert bar.seen == [(True, n / 6, True) for n in range(6)]
    assert (bar.train_batch_idx, bar.total_val_batches_current_epoch) == (6, 2)
    assert drawn
    assert all(set(metrics) <= {"loss"} for metrics in drawn)


def test_a_loader_without_a_length_has_infinitely_many_batches():
    bar, _ = on_screen(ProgressBar, train=Stream(loader()))
    assert bar.total_train_batches == float("inf")


def test_get_metrics_chooses_the_metrics_beside_the_bar():
    class Chooses(ProgressBar):
        def get_metrics(self, trainer, pl_module):
            metrics = super().get_metrics(trainer, pl_module)
            return {
                "name": type(pl_module).__name__,
                **{f"my {key}": metrics[key] for key in metrics},
            }

    _, drawn = on_screen(Chooses)
    assert drawn[-1]["name"] == "Logs"
    assert set(drawn[-1]) == {"name", "my loss"}


def test_a_disabled_bar_draws_nothing_until_it_is_enabled():
    class Toggles(ProgressBar):
        def on_train_start(self, trainer, pl_module):
            self.disable()
            assert self.is_disabled

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                self.enable()

    assert on_screen(Toggles, num_sanity_val_steps=0)[1] == []
    assert on_screen(Toggles, num_sanity_val_steps=0, max_epochs=2)[1] != []


def test_a_refresh_rate_of_0_draws_nothing():
    bar, drawn = on_screen(RichProgressBar, 0)
    assert drawn == []
    assert (bar.is_disabled, bar.refresh_rate) == (True, 0)
    with pytest.raises(UsageError, match=r"refresh_rate=-1. Fix: a number of batches"):
        TQDMProgressBar(refresh_rate=-1)


def test_before_a_run_it_knows_no_batches():
    with pytest.raises(AttributeError, match="ProgressBar has not seen a run yet"):
        _ = ProgressBar().total_train_batches


def test_the_trainer_has_the_bar():
    bar = callbacks.TQDMProgressBar()
    one = trainer(callbacks=[bar], enable_progress_bar=True)
    one.fit(EvalNet(), [(torch.ones(2, 3), torch.ones(2, 1))])
    assert one.progress_bar_callback is bar
