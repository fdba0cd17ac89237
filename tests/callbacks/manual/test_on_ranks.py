"""Manual optimisation on two ranks without a process group: equals one process."""

import pytest
import torch
from regression import samples
from threads import equal, on_threads
from torch.utils.data import DataLoader

from ...ddp.manual import STEPS, Two, by_hand


@pytest.mark.parametrize("how", STEPS)
def test_two_ranks_train_as_one_process_does(how):
    trainer, strategy = on_threads()
    trainer.fit(Two(how), DataLoader(samples(), batch_size=4))
    first, second = (run.module.state_dict() for run in strategy.runs)
    assert equal(first, second)
    for key, expected in by_hand(how, samples()).items():
        torch.testing.assert_close(first[key], expected, rtol=1e-4, atol=1e-5)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    class Overflows(Two):
        def training_step(self, batch, batch_idx):
            a, _ = self.optimizers()
            loss = self.loss(batch, self.global_rank) * 0.01
            a.zero_grad()
            self.manual_backward(
                loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss
            )
            a.step()

    trainer, strategy = on_threads(precision="16-mixed")
    trainer.fit(Overflows("not toggled"), DataLoader(samples(), batch_size=4))
    first, second = strategy.runs
    assert equal(first.module.state_dict(), second.module.state_dict())
    assert all(torch.isfinite(value).all() for value in first.module.state_dict().values())
    assert first.metrics["skipped_steps"] == second.metrics["skipped_steps"] == 1
