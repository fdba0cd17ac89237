"""accumulation_scheduler: the batches of a step, from epoch to epoch."""

import pytest
from small_models import Net, assert_equal, fit, loader, trainer

from geartrain.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from geartrain.testing import ThreadRanks


class Counts(Net):
    def __init__(self):
        super().__init__()
        self.steps, self.sizes = [], []

    def on_train_epoch_end(self):
        self.steps.append(self.trainer.global_step)
        self.sizes.append(self.trainer.accumulate_grad_batches)


@pytest.mark.parametrize(("strategy", "batches"), [("single", 6), (ThreadRanks(2), 3)])
def test_each_epoch_has_its_own_number(strategy, batches):
    net = Counts()
    scheduler = GradientAccumulationScheduler({1: 4, 3: 2})
    one = fit(net, max_epochs=4, strategy=strategy, plugins=[scheduler])
    per_epoch = [batches, -(-batches // 4), -(-batches // 4), -(-batches // 2)]
    assert one.global_step == sum(per_epoch) == one.estimated_stepping_batches
    assert set(net.sizes) >= {1, 4, 2}
    assert one.accumulate_grad_batches == 1


def test_a_run_that_resumes_continues_with_the_number_of_its_epoch(tmp_path):
    def run(folder, **options):
        net = Net()
        every = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1}
        plugins = [
            GradientAccumulationScheduler({0: 2, 1: 3}),
            ModelCheckpoint(dirpath=folder, **every),
        ]
        trainer(max_epochs=3, plugins=plugins).fit(net, loader(), **options)
        return net

    whole = run(tmp_path / "whole")
    for step in (3, 4):  # at the end of an epoch, and within one
        path = tmp_path / "whole" / f"step={step}.ckpt"
        assert_equal(run(tmp_path / str(step), ckpt_path=path), whole)
