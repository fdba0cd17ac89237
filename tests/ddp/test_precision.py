"""Two ranks of ddp train in each precision like one process, and skip a step together."""

import pytest
import torch
from several_ranks import kept_by
from torch.utils.data import DataLoader

from geartrain import hookimpl

from .cases import Net, ddp, one_trainer, samples

#: Tolerances by precision: two ranks sum the halves of a batch in another order than one process.
TOLERANCES = {"64-true": 1e-12, "bf16-true": 0.05, "16-mixed": 2e-3, "bf16-mixed": 2e-2}


class Overflows(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and self.trainer.global_rank == 1 else loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": self.schedule, "interval": "step"}]


class Moves:
    def __init__(self):
        self.before, self.moved = None, []

    @hookimpl
    def on_step_end(self, run):
        now = [p.detach().clone() for p in run.module.parameters()]
        self.moved.append(
            self.before is not None
            and any(not torch.equal(a, b) for a, b in zip(self.before, now, strict=True))
        )
        self.before = now


def fit(make, precision, batch_size):
    net = Net()
    trainer = make(precision=precision, gradient_clip_val=0.002, accumulate_grad_batches=2)
    trainer.fit(net, DataLoader(samples(), batch_size=batch_size))
    return net.state_dict()


def train_and_overflow():
    found = {precision: fit(ddp, precision, 4) for precision in TOLERANCES}
    net, moves = Overflows(), Moves()
    trainer = ddp(precision="16-mixed", plugins=[moves])
    trainer.fit(net, DataLoader(samples(), batch_size=4))
    skipped = trainer.run.metrics["skipped_steps"]
    return {
        "found": found,
        "moved": moves.moved,
        "skipped": skipped,
        "schedule": net.schedule.last_epoch,
    }


two_ranks = kept_by(train_and_overflow)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_two_ranks_train_as_one_process_does(two_ranks, precision):
    before, one = Net().state_dict(), fit(one_trainer, precision, 8)
    for name, expected in one.items():
        theirs = two_ranks[0]["found"][precision][name]
        assert theirs.dtype == expected.dtype
        torch.testing.assert_close(
            theirs, expected, rtol=TOLERANCES[precision], atol=TOLERANCES[precision]
        )
        assert torch.equal(theirs, two_ranks[1]["found"][precision][name]), (
            f"{name} differs between ranks"
        )
    assert any(
        not torch.equal(value.to(torch.float32), before[name]) for name, value in one.items()
    )


def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks):
    for kept in two_ranks:
        # The first step counts as unmoved, because no weights before it were recorded.
        assert kept["moved"] == [False, True, False, True, True, True]
        assert kept["skipped"] == 1
        assert kept["schedule"] == 5


def test_a_plan_has_the_precision():
    assert ddp(precision=16).plan.as_dict()["precision"]["name"] == "16-mixed"
