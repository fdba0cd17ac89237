"""The attributes of a Trainer that third-party callbacks read."""

import math
import os
import signal

import pytest
import torch
from small_models import EvalNet, Net, fit, loader, samples, trainer
from threads import on_threads
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.callbacks import Callback, EarlyStopping, ModelCheckpoint
from geartrain_callbacks.trainer_view import TrainerState


class Reads(Callback):
    """Keeps the values of a trainer's attributes in some hooks."""

    def __init__(self, *names):
        self.names, self.seen = names, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(tuple(getattr(trainer, name) for name in self.names))


def test_before_a_run():
    one = trainer()
    assert (one.global_step, one.current_epoch, one.callback_metrics) == (0, 0, {})
    assert (one.global_rank, one.local_rank, one.world_size, one.is_global_zero) == (0, 0, 1, True)
    assert one.state == TrainerState(None, None, "initializing")
    assert not any([one.training, one.evaluating, one.interrupted, one.received_sigterm])
    assert one.lightning_module is one.model is one.train_dataloader is one.val_dataloaders is None
    assert (one.num_training_batches, one.num_val_batches) == (math.inf, [])
    assert not one.optimizers
    assert one.progress_bar_metrics == {}
    assert one.default_root_dir == one.log_dir == os.getcwd()
    assert (one.num_nodes, one.num_devices, one.device_ids, one.node_rank) == (1, 1, [0], 0)
    assert one.strategy.broadcast("mine") == "mine"
    assert one.strategy.root_device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="has not run anything"):
        _ = one.estimated_stepping_batches


def test_in_and_after_a_run(tmp_path):
    reads = Reads("state", "training", "is_last_batch", "interrupted")
    stop, save = (
        EarlyStopping("val_loss/dataloader_idx_0"),
        ModelCheckpoint(dirpath=tmp_path / "saved"),
    )
    module, train = EvalNet(), DataLoader(list(samples()), 4)
    one = trainer(callbacks=[reads, stop, save], output=tmp_path / "run", num_sanity_val_steps=1)
    one.fit(module, train, [loader(8), loader(12)])
    running = TrainerState("fit", "train", "running")
    assert reads.seen == [(running, True, last, False) for last in [False] * 5 + [True]]
    assert one.state == TrainerState("fit", None, "finished")
    assert one.state.finished
    assert not one.training
    assert one.callbacks[:3] == [reads, stop, save]
    assert one.early_stopping_callback is stop
    assert one.checkpoint_callbacks == [one.checkpoint_callback] == [save]
    assert one.loggers == []
    assert one.logger is one.progress_bar_callback is None
    assert one.lightning_module is module
    assert one.optimizers == one.run.optimizers
    assert one.train_dataloader is train
    assert [len(one) for one in one.val_dataloaders] == [2, 3]
    assert (one.num_training_batches, one.num_val_batches) == (6, [2, 3])
    assert one.num_sanity_val_batches == [1, 1]
    assert one.log_dir == str(tmp_path / "run")
    assert (one.max_epochs, one.max_steps, one.log_every_n_steps) == (1, -1, 50)


def test_print(capsys):
    trainer().print("a", 1, sep="-")
    assert capsys.readouterr().out == "a-1\n"


@pytest.mark.parametrize(
    ("error", "failure", "sigterm"),
    [
        (lambda: 1 / 0, "ZeroDivisionError", False),
        (lambda: signal.raise_signal(signal.SIGTERM), "SIGTERM", True),
        (lambda: signal.raise_signal(signal.SIGINT), "KeyboardInterrupt", False),
    ],
)
def test_a_run_that_fails_was_interrupted(error, failure, sigterm):
    class Fails(Callback):
        def on_train_start(self, trainer, pl_module):
            error()

        def on_exception(self, trainer, pl_module, exception):
            states.append((trainer.interrupted, trainer.received_sigterm, trainer.state.status))

    states, one = [], trainer(callbacks=[Fails()])
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        one.fit(Net(), loader())
    assert states == [(True, sigterm, "interrupted")]
    assert (one.interrupted, one.received_sigterm) == (True, sigterm)
    assert one.run.loop.failure == failure
    one.callbacks.clear()  # a copy
    assert len(one.callbacks) == 1


def test_the_strategy_on_ranks():
    seen = {}

    class Asks(Callback):
        def on_train_start(self, trainer, pl_module):
            rank, strategy = trainer.global_rank, trainer.strategy
            strategy.barrier("named")
            seen[rank] = (
                strategy.broadcast(rank + 5),
                strategy.broadcast(rank + 5, src=1),
                strategy.reduce_boolean_decision(rank == 0),
                strategy.reduce_boolean_decision(rank == 0, all=False),
                strategy.all_gather(torch.tensor([rank])).flatten().tolist(),
                strategy.is_distributed,
                strategy.world_size,
                strategy.is_global_zero,
            )

    one, plugin = on_threads(callbacks=[Asks()])
    one.fit(Net(), loader())
    assert one.strategy.plugin is plugin
    common = (5, 6, False, True, [0, 1], True, 2)
    assert seen == {0: (*common, True), 1: (*common, False)}


def test_an_unknown_attribute_of_the_strategy():
    with pytest.raises(AttributeError, match="invented"):
        _ = trainer().strategy.invented


class Logger:
    """A logger with an object of its library."""

    @property
    def experiment(self):
        return "the library's"

    @gt.hookimpl
    def log_metrics(self, metrics, step): ...


def test_loggers_with_an_experiment():
    one = fit(plugins=[Logger()])
    assert [logger.experiment for logger in one.loggers] == ["the library's"]
    assert one.logger is one.loggers[0]
