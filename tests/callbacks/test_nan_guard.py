"""NaNGuard: it detects a loss or gradients that are not finite."""

import pytest
import torch
from small_models import Net, assert_equal, differ, fit, loader, trainer, weights
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from geartrain import TrainingError, UsageError
from geartrain.callbacks import NaNGuard


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


@pytest.mark.parametrize(("flush", "steps"), [(1, 3), (4, 4), (50, 6)])
@pytest.mark.parametrize(
    ("check", "what"), [("loss", "the loss"), ("gradients", "the gradient of layers.2.bias")]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_stop_names_the_first_bad_step(flush, steps, check, what, value, capsys):
    guard, ended = guarded(
        Bad(3, "loss" if check == "loss" else "gradient", value),
        "stop",
        check,
        log_every_n_steps=flush,
    )
    assert ended.global_step == steps
    assert guard.reason == f"{what} was not finite in step 3, on rank 0."
    assert guard.reason in capsys.readouterr().err


@pytest.mark.parametrize("flush", [1, 50])
def test_raise_fails_the_run(flush):
    with pytest.raises(
        TrainingError,
        match=r"geartrain-callbacks\[nan_guard\]: the loss was not finite in step 2, on rank 0",
    ):
        guarded(Bad(2), "raise", log_every_n_steps=flush)


@pytest.mark.parametrize("action", ["stop", "raise", "skip"])
@pytest.mark.parametrize("check", ["loss", "gradients"])
def test_finite_ones_change_nothing(action, check):
    torch.manual_seed(3)
    plain = Net()
    fit(plain, max_epochs=3)
    torch.manual_seed(3)
    module = Net()
    guard, ended = guarded(module, action, check)
    assert ended.global_step == 18
    assert guard.reason == ""
    assert_equal(module, plain)


def test_large_finite_gradients_are_fine():
    class Large(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 1e30

    _, ended = guarded(
        Large(lambda p: torch.optim.SGD(p, lr=1e-38)), "raise", "gradients", max_epochs=1
    )
    assert ended.global_step == 6


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
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": LambdaLR(optimizer, lambda n: 0.5**n),
                    "interval": "step",
                },
            }

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
    _, ended = guarded(
        module, "skip", max_epochs=1, limit_train_batches=4, accumulate_grad_batches=4
    )
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

    guard, _ = guarded(Alternates(), "stop", "gradients")
    assert guard.reason == "the gradient of odd.weight was not finite in step 4, on rank 0."


def test_gradients_with_16_mixed_are_refused():
    with pytest.raises(UsageError, match="the scaler skips those steps"):
        guarded(Net(), "stop", "gradients", precision="16-mixed")


def test_skipping_with_lbfgs_is_refused():
    with pytest.raises(UsageError, match="needs a closure"):
        guarded(Net(torch.optim.LBFGS), "skip")


def test_lbfgs_is_stopped():
    guard, ended = guarded(Bad(2, optimizer=torch.optim.LBFGS), "stop", log_every_n_steps=1)
    assert "in step 1" in guard.reason
    assert ended.global_step == 1


@pytest.mark.parametrize("wrong", [{"action": "ignore"}, {"check": "weights"}])
def test_wrong_options(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        NaNGuard(**wrong)


def test_last_ckpt_is_not_overwritten_by_an_epoch_that_raises(tmp_path):
    with pytest.raises(TrainingError):
        trainer(plugins=[NaNGuard("raise")], output=tmp_path / "run", max_epochs=3).fit(
            Bad(9), loader()
        )
    kept = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert kept["epoch"] == 1
    assert all(torch.isfinite(t).all() for t in kept["model"].values())
