"""A geartrain Module inside another one is part of the run."""

import pytest
import torch
from small_models import Net, fit, loader, trainer
from threads import on_threads

import geartrain as gt
from geartrain.module.module import NotAttached


class Encoder(gt.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.seen = []

    def forward(self, x):
        self.log("size", float(len(x)))
        place = self.trainer.global_rank, self.global_rank, self.current_epoch, self.global_step
        self.seen.append(place)
        return x


class Outer(Net):
    def __init__(self, when):
        super().__init__()
        self.when = when
        if when == "init":
            self.encoder = Encoder()

    def setup(self, stage):
        if self.when == "setup":
            self.encoder = Encoder()

    def training_step(self, batch, batch_idx):
        self.encoder(batch[0])
        return self.loss(batch)


@pytest.mark.parametrize("when", ["init", "setup"])
def test_it_logs_and_knows_the_trainer(when):
    net = Outer(when)
    run = trainer(max_epochs=2, log_every_n_steps=1)
    run.fit(net, loader(8))
    assert net.encoder.seen == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 2), (0, 0, 1, 3)]
    assert run.callback_metrics["size"] == 4
    assert net.encoder.trainer is run
    assert (net.current_epoch, net.global_step, net.encoder.global_step) == (2, 4, 4)
    with pytest.warns(UserWarning, match="no Trainer runs this module"):
        net.encoder(torch.ones(1, 3))


def test_it_knows_its_rank():
    run, strategy = on_threads(2, max_epochs=1)
    run.fit(Outer("init"), loader(16))
    ranks = [{place[:2] for place in each.module.encoder.seen} for each in strategy.runs]
    assert ranks == [{(0, 0)}, {(1, 1)}]


def test_one_outside_the_module_stays_unattached():
    other = Encoder()
    fit(Outer("init"))
    with pytest.raises(NotAttached):
        _ = other.trainer


def test_optimizers_and_schedulers_stay_after_a_fit():
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    net = Scheduled()
    assert net.optimizers() == []
    run = fit(net)
    assert net.optimizers() is run.optimizers[0]
    assert net.lr_schedulers().optimizer is net.optimizers()
