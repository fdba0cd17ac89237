"""A time as ``val_check_interval``: when validation comes, alone, on ranks and after a resume."""

from types import SimpleNamespace

import pytest
import regression
import torch
from small_models import EvalNet, fit, loader, trainer
from threads import on_threads

from geartrain import hookimpl
from geartrain.callbacks import ModelCheckpoint


class Times:
    """Records the steps done at each validation."""

    def __init__(self):
        self.steps = []

    @hookimpl
    def on_validation_start(self, run):
        self.steps.append(run.step)


@pytest.fixture
def ticks(monkeypatch):
    """A plugin with which each training step takes a second, and each validation ten."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("geartrain_callbacks.timed_validation.time", clock)

    class Ticks:
        @hookimpl
        def on_step_end(self):
            clock.now += 1

        @hookimpl
        def on_validation_end(self):
            clock.now += 10

    return Ticks()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"log_every_n_steps": 1}, [4, 8, 12]),
        ({"log_every_n_steps": 3}, [6, 12]),  # at a flush
        ({"log_every_n_steps": 50}, [6, 12]),  # at the end of an epoch
        ({"log_every_n_steps": 1, "check_val_every_n_epoch": 2}, [7, 11]),
        ({"log_every_n_steps": 1, "check_val_every_n_epoch": None}, [4, 8, 12]),
        ({"log_every_n_steps": 1, "val_check_interval": {"seconds": 7}}, [7]),
        ({"log_every_n_steps": 1, "limit_val_batches": 0}, []),
        ({"log_every_n_steps": 1, "accumulate_grad_batches": 2}, [4]),
    ],
)
def test_validation_after_a_time(ticks, options, steps):
    """Two epochs of 6 batches; a validation every 4 seconds."""
    times, options = Times(), {"val_check_interval": "00:00:00:04", **options}
    fit(EvalNet(), val=loader(), plugins=[times, ticks], max_epochs=2, **options)
    assert times.steps == steps


def test_a_run_that_resumes_after_a_validation_does_not_repeat_it(ticks, tmp_path):
    """Its clock starts from scratch: the next validation comes 4 seconds later."""
    options = {"val_check_interval": "00:00:00:04", "log_every_n_steps": 1, "max_epochs": 2}
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1)
    fit(EvalNet(), val=loader(), plugins=[ticks, saves], **options)
    times = Times()
    one = trainer(plugins=[times, ticks], **options)
    one.fit(EvalNet(), loader(), loader(), ckpt_path=tmp_path / "step=4.ckpt")
    assert times.steps == [8, 12]


class Plateau(EvalNet):
    """Records when its scheduler steps: every third step, after the next validation."""

    def configure_optimizers(self):
        module, self.steps = self, []

        class Recording(torch.optim.lr_scheduler.ReduceLROnPlateau):
            def step(self, metrics):
                module.steps.append(module.global_step)

        optimizer = super().configure_optimizers()
        when = {"monitor": "val_loss", "interval": "step", "frequency": 3}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": Recording(optimizer), **when},
        }


def test_a_scheduler_that_waits_for_a_validation_is_stepped_after_a_resume(ticks, tmp_path):
    """The checkpoint is saved at the end of the validation, before the scheduler's step."""
    options = {"val_check_interval": "00:00:00:04", "log_every_n_steps": 1, "max_epochs": 2}
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1)
    whole, resumed = Plateau(), Plateau()
    fit(whole, val=loader(), plugins=[ticks, saves], **options)
    one = trainer(plugins=[ticks], **options)
    one.fit(resumed, loader(), loader(), ckpt_path=tmp_path / "step=4.ckpt")
    assert whole.steps == resumed.steps == [4, 8, 12]


def test_the_first_rank_whose_time_is_up_lets_all_validate():
    """For the other rank no second has passed. A rank that validated alone would hang."""

    class Hurries:
        @hookimpl
        def on_step_end(self, run):
            if run.world.rank == 1 and run.step == 2:
                (timed,) = (p.plugin for p in run.hooks.parts if p.info.name == "timed_validation")
                timed.validated_at -= 3600

    times = Times()
    one, _ = on_threads(
        plugins=[Hurries(), times], val_check_interval={"hours": 1}, log_every_n_steps=2
    )
    one.fit(regression.Net(), loader(), loader())
    assert times.steps == [2]  # of rank 0
