"""The function ``run_plugin``."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain.callbacks import Callback, EarlyStopping
from geartrain.testing import run_plugin
from geartrain_testing.nets import Net


class Norm:
    """A plugin that logs the norm of the gradients and counts steps."""

    def __init__(self, scale: float = 1.0):
        self.scale, self.steps = scale, 0

    @gt.hookimpl(wrapper=True)
    def reduce_gradients(self, run):
        yield
        self.steps += 1
        run.log(
            "norm",
            self.scale * torch.nn.utils.get_total_norm(p.grad for p in run.module.parameters()),
        )


class Slope(gt.Module):
    """A module whose weight falls by the rank's number in every step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return (self.weight * self.global_rank).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_plugin_runs_on_two_ranks_by_default():
    plugin = Norm()
    first, second = run_plugin(plugin)
    assert (first.rank, second.rank) == (0, 1)
    assert first.plugin is plugin
    assert second.plugin is not plugin
    assert first.plugin.steps == second.plugin.steps == 4
    assert first.metrics["norm"] == second.metrics["norm"] > 0
    assert [step for step, metrics in first.logged.items() if "norm" in metrics] == [1, 2, 3, 4]
    assert second.logged == {}
    assert first.metrics["val_loss"] == second.metrics["val_loss"]
    assert (first.result, first.error) == (second.result, second.error) == (None, None)
    assert [rank.trainer.global_rank for rank in (first, second)] == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_number_of_ranks_and_the_module_can_be_chosen(ranks):
    found = run_plugin(Norm(), ranks=ranks, module=Slope(), max_steps=2)
    assert len(found) == ranks
    for rank in found:
        assert isinstance(rank.module, Slope)
        assert rank.metrics["norm"] == pytest.approx((ranks - 1) / 2)  # the mean of 0, 1, ...
        assert rank.module.weight.item() == pytest.approx(-2 * (ranks - 1) / 2)


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(12.0)), None])
def test_the_data_can_be_chosen(data):
    class Own(Slope):
        seen = ()

        def training_step(self, batch, batch_idx):
            self.seen = (*self.seen, *batch[0].tolist())
            return super().training_step(batch, batch_idx)

    if data is None:  # then the module has a loader
        Own.train_dataloader = lambda self: DataLoader(TensorDataset(torch.arange(12.0)), 2)
    first, second = run_plugin(module=Own(), data=None if data is None else DataLoader(data, 2))
    assert sorted(first.module.seen + second.module.seen) == list(range(12))


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_other_commands(command):
    first, second = run_plugin(command=command, ranks=2)
    assert first.result
    if command == "predict":
        assert [batch["number"].tolist() for batch in first.result] == [
            [2 * i, 2 * i + 1] for i in range(8)
        ]
        assert len(second.result) == 8
    else:
        assert (
            first.result
            == second.result
            == [{f"{'val' if command == 'validate' else 'test'}_loss": pytest.approx(0.7, abs=0.3)}]
        )


def test_callbacks_names_and_several_plugins():
    class Notes(Callback):
        def on_train_end(self, trainer, pl_module):
            self.rank = trainer.global_rank

    given = [Notes(), EarlyStopping("val_loss", patience=3), Norm()]
    first, second = run_plugin(
        given, callbacks=[Notes()], plugins=[gt.callbacks.Timer(60)], max_epochs=2
    )
    for rank in (first, second):
        assert [type(plugin) for plugin in rank.plugins] == [Notes, EarlyStopping, Norm]
        assert rank.plugin.rank == rank.rank
    assert first.plugins == given
    (one,) = run_plugin("timer", ranks=1, plugin_options={"timer": {"duration": 60.0}})
    assert type(one.plugin).__name__ == "Timer"
    (one,) = run_plugin(Norm, ranks=1)
    assert one.plugin.steps == 4


def test_options_of_the_trainer(tmp_path):
    first, _ = run_plugin(
        Norm(), output=tmp_path / "out", max_epochs=2, accumulate_grad_batches=2, seed=3
    )
    assert (first.trainer.global_step, first.plugin.steps) == (4, 4)
    assert (tmp_path / "out" / "last.ckpt").exists()
    (again,) = run_plugin(
        ranks=1, command="test", module=Net(), ckpt_path=tmp_path / "out" / "last.ckpt"
    )
    assert all(
        torch.equal(value, again.module.state_dict()[name])
        for name, value in first.module.state_dict().items()
    )


# --- errors ---------------------------------------------------------------------------------------


class Breaks:
    def __init__(self, rank):
        self.rank = rank

    @gt.hookimpl
    def on_step_end(self, run):
        if run.world.rank == self.rank and run.step == 2:
            raise ValueError("the plugin's own")


def test_an_error_is_raised_and_names_rank_and_hook():
    with pytest.raises(ValueError, match="the plugin's own") as caught:
        run_plugin(Breaks(1))
    assert "rank 1 of 2 raised this" in caught.value.__notes__
    assert "raised in hook 'on_step_end' of Breaks" in caught.value.__notes__


@pytest.mark.parametrize("rank", [0, 1])
def test_with_check_false_each_rank_has_its_error(rank):
    found = run_plugin(Breaks(rank), check=False)
    assert str(found[rank].error) == "the plugin's own"
    assert isinstance(found[1 - rank].error, gt.TrainingError)
    assert found[rank].trainer.global_step == 2


def test_a_collective_on_one_rank_is_an_error_with_its_line():
    class Alone:
        @gt.hookimpl
        def on_step_end(self, run):
            if run.world.rank == 1:
                run.hooks.barrier(run=run)

    line = Alone.on_step_end.__code__.co_firstlineno + 3
    with pytest.raises(gt.TrainingError, match=rf"rank 1 in barrier \({__file__}:{line}\)"):
        run_plugin(Alone())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": "train"}, "command='train' must be one of 'fit', 'validate'"),
        ({"strategy": "ddp"}, "run_plugin always uses the strategy ThreadRanks"),
        ({"devices": 1}, "devices=1 would do nothing"),
        ({"plugin": object()}, "nothing marked with @hookimpl"),
        ({"plugin": "nowhere"}, "nowhere"),
        ({"max_epoch": 3}, "max_epoch"),
        ({"ranks": 0}, "ranks=0"),
    ],
)
def test_wrong_usage_is_refused_also_with_check_false(arguments, message):
    with pytest.raises(gt.UsageError, match=message):
        run_plugin(**arguments, check=False)


def test_neither_torch_nor_pytest_is_imported_before_it_is_used():
    code = (
        "import sys, geartrain.testing; print('torch' in sys.modules); "
        "geartrain.testing.run_plugin; print('pytest' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
