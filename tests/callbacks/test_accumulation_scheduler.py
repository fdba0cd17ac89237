"""accumulation_scheduler: the batches of a step, from epoch to epoch."""

import pytest
from small_models import Net, assert_equal, fit, loader, trainer

import geartrain as gt
from geartrain import UsageError
from geartrain.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from geartrain.testing import ThreadRanks


class Counts(Net):
    def __init__(self):
        super().__init__()
        self.steps, self.sizes = [], []

    def on_train_epoch_end(self):
        self.steps.append(self.trainer.global_step)
        self.sizes.append(self.trainer.accumulate_grad_batches)


def saver(folder):
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize(("strategy", "batches"), [("single", 6), (ThreadRanks(2), 3)])
def test_each_epoch_has_its_own_number(strategy, batches):
    net = Counts()
    one = fit(
        net,
        max_epochs=4,
        strategy=strategy,
        plugins=[GradientAccumulationScheduler({1: 4, 3: 2})],
    )
    per_epoch = [batches, -(-batches // 4), -(-batches // 4), -(-batches // 2)]
    assert one.global_step == sum(per_epoch) == one.estimated_stepping_batches
    assert set(net.sizes) >= {1, 4, 2}
    assert one.accumulate_grad_batches == 1


def test_a_run_that_resumes_continues_with_the_number_of_its_epoch(tmp_path):
    def run(folder, **options):
        net = Net()
        plugins = [
            GradientAccumulationScheduler({0: 2, 1: 3}),
            saver(folder),
        ]
        trainer(max_epochs=3, plugins=plugins).fit(net, loader(), **options)
        return net

    whole = run(tmp_path / "whole")
    for step in (1, 3, 4, 6):
        path = tmp_path / "whole" / f"step={step}.ckpt"
        assert_equal(run(tmp_path / str(step), ckpt_path=path), whole)


@pytest.mark.parametrize("wrong", [{}, None, 3, {"0": 2}, {0: 0}, {-1: 2}, {0: True}, {0.5: 1}])
def test_wrong_schedules(wrong):
    with pytest.raises(UsageError, match="accumulation_scheduler: "):
        GradientAccumulationScheduler(wrong)


def test_contradictions_are_refused_before_the_start():
    class Manual(gt.Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx): ...

        def configure_optimizers(self): ...

    plugins = [GradientAccumulationScheduler({0: 2})]
    with pytest.raises(UsageError, match=r"it is 3 too\. Fix: give one"):
        fit(plugins=plugins, accumulate_grad_batches=3)
    with pytest.raises(UsageError, match="would do nothing: the module optimizes manually"):
        trainer(plugins=plugins).fit(Manual(), loader())


def test_on_the_command_line():
    plan = gt.Trainer(
        accelerator="cpu",
        plugins=["accumulation_scheduler"],
        plugin_options={"accumulation_scheduler": {"scheduling": {0: 2}}},
    ).plan
    assert plan.plugins[0].name == "accumulation_scheduler"
