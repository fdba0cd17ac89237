"""NaNGuard: it detects a loss or gradients that are not finite."""

import json
import re

import pytest
import torch
from small_models import Net, assert_equal, differ, fit, loader, trainer, weights
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from geartrain import TrainingError
from geartrain.callbacks import EMA, ModelCheckpoint, NaNGuard


class Bad(Net):
    """A net whose loss, or only one gradient, is NaN or infinite in training step ``when``."""

    def __init__(self, when, what="loss", value=float("nan"), **options):
        super().__init__(**options)
        self.when, self.what, self.value, self.n = when, what, value, 0
        self.layers[2].bias.register_hook(
            lambda grad: grad * value if self.what == "gradient" and self.n == when else grad
        )

    def training_step(self, batch, batch_idx):
        self.n += 1
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if self.what == "loss" and self.n == self.when else loss


def guarded(module, *arguments, **options):
    guard = NaNGuard(*arguments)
    return guard, fit(module, plugins=[guard], **{"max_epochs": 3, **options})


LOSS, GRADIENT = ("loss", "the loss"), ("gradients", "the gradient of layers.2.bias")


@pytest.mark.parametrize(
    ("flush", "steps", "check", "named", "value"),
    [
        (1, 3, *LOSS, "nan"),
        (4, 4, *LOSS, "inf"),
        (50, 6, *LOSS, "nan"),
        (1, 3, *GRADIENT, "inf"),
        (50, 6, *GRADIENT, "nan"),
    ],
)
def test_the_run_fails_and_names_the_first_bad_step(flush, steps, check, named, value):
    guard = NaNGuard(check=check)
    one = trainer(plugins=[guard], log_every_n_steps=flush, max_epochs=3)
    reason = f"{named} was not finite in step 3, on rank 0."
    with pytest.raises(TrainingError, match=re.escape(f"geartrain-callbacks[nan_guard]: {reason}")):
        one.fit(Bad(3, "loss" if check == "loss" else "gradient", float(value)), loader())
    assert one.global_step == steps
    assert guard.reason == reason


@pytest.mark.parametrize("action", ["raise", "skip"])
@pytest.mark.parametrize("check", ["loss", "gradients"])
def test_finite_ones_change_nothing(action, check):
    plain, module = Net(), Net()
    module.load_state_dict(plain.state_dict())
    fit(plain)
    guard, ended = guarded(module, action, check, max_epochs=1)
    assert (ended.global_step, guard.reason) == (6, "")
    assert_equal(module, plain)


def test_large_finite_gradients_are_fine():
    class Large(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 1e30

    module = Large(lambda p: torch.optim.SGD(p, lr=1e-38))
    assert guarded(module, "raise", "gradients", max_epochs=1)[1].global_step == 6


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), torch.optim.AdamW],
)
@pytest.mark.parametrize("check", ["loss", "gradients"])
def test_a_skipped_step_changes_nothing(optimizer, check):
    batches = list(loader())
    torch.manual_seed(3)
    module = Bad(3, "loss" if check == "loss" else "gradient", optimizer=optimizer)
    without = Net(optimizer)
    without.load_state_dict(module.state_dict())
    _, ended = guarded(module, "skip", check, train=batches, max_epochs=1)
    fit(without, train=batches[:2] + batches[3:])
    assert ended.global_step == 6
    assert ended.callback_metrics["skipped_nan_steps"] == 1
    assert_equal(module, without)


def test_schedulers_wait_for_a_skipped_step():
    class Scheduled(Bad):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = LambdaLR(optimizer, lambda n: 0.5**n)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Scheduled(3)
    _, ended = guarded(module, "skip", max_epochs=1)
    assert ended.run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**5)


def test_skipped_steps_are_counted_per_epoch_also_with_16_mixed():
    module = Bad(3)
    _, ended = guarded(module, "skip", max_epochs=2, precision="16-mixed")
    assert ended.callback_metrics["skipped_nan_steps"] == 0
    assert ended.callback_metrics["skipped_steps"] == 0
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert differ(module, Net())


def test_skipping_one_micro_batch_skips_its_window():
    module = Bad(3)
    before = weights(module)
    options = {"limit_train_batches": 4, "accumulate_grad_batches": 4}
    _, ended = guarded(module, "skip", max_epochs=1, **options)
    assert ended.callback_metrics["skipped_nan_steps"] == 1
    assert_equal(module, before)


def test_parameters_that_come_and_go_are_still_named():
    class Alternates(Net):
        def __init__(self):
            super().__init__()
            self.odd, self.even = nn.Linear(3, 1), nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch) + (self.odd if batch_idx % 2 else self.even)(batch[0]).mean()
            return loss + (self.odd.weight.sum() * float("nan") if batch_idx == 3 else 0)

    reason = "the gradient of odd.weight was not finite in step 4, on rank 0"
    with pytest.raises(TrainingError, match=reason):
        guarded(Alternates(), "raise", "gradients")


def test_lbfgs_fails_the_run():
    with pytest.raises(TrainingError, match="the loss was not finite in step 1"):
        guarded(Bad(2, optimizer=torch.optim.LBFGS), log_every_n_steps=1)


def finite(path):
    """Return the steps of a checkpoint; every tensor in it must be finite."""
    state = torch.load(path, weights_only=True)
    for name in ("model", "trained", "average"):
        assert all(torch.isfinite(t).all() for t in state.get(name, {}).values())
    return state["step"]


EACH_STEP = {"every_n_train_steps": 1}


@pytest.mark.parametrize(
    ("action", "what", "every", "more"),
    [
        ("raise", "loss", EACH_STEP, []),
        ("raise", "gradient", EACH_STEP, [EMA(0.9)]),
        ("raise", "gradient", {}, []),
        ("raise", "loss", {}, [EMA(0.9)]),
        ("skip", "loss", EACH_STEP, [EMA(0.9)]),
        ("skip", "gradient", {}, []),
    ],
)
def test_a_checkpoint_never_has_nan(action, what, every, more, tmp_path):
    """The NaN is in step 9, in the second epoch, and the flush is far away."""
    saves = ModelCheckpoint(save_last=True, **every)
    plugins = [NaNGuard(action), saves, *more]
    one = trainer(plugins=plugins, output=tmp_path / "run", max_epochs=3)
    if action == "skip" and what == "loss":
        one.fit(Bad(9), loader())
        steps = (18, 18)
    else:
        with pytest.raises(TrainingError, match="was not finite in step"):
            one.fit(Bad(9, what), loader())
        steps = (6, 8 if every else 6)
    assert finite(tmp_path / "run" / "last.ckpt") == steps[0]
    assert finite(saves.last_model_path) == finite(saves.best_model_path) == steps[1]
    kept = sorted(str(path) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == sorted((saves.last_model_path, saves.best_model_path))
    if steps[0] == 6:
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
        resumed = trainer(plugins=plugins, output=tmp_path / "run", max_epochs=3)
        resumed.fit(Net(), loader(), ckpt_path="last")
        assert resumed.global_step == 18


def test_a_resume_from_weights_with_nan_fails(tmp_path):
    fit(Bad(3), output=tmp_path / "run")
    resumed = trainer(plugins=[NaNGuard()], output=tmp_path / "run", max_epochs=2)
    with pytest.raises(TrainingError, match="was not finite in step 7"):
        resumed.fit(Net(), loader(), ckpt_path="last")
