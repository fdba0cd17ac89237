"""Every precision against the loop by hand on the same device."""

import pytest
import torch

from .device import DEVICE, ON_DEVICE, Net, assert_equal, by_hand, fit, loader, trainer

pytestmark = ON_DEVICE


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("32-true", {}),
        ("64-true", {"dtype": torch.float64}),
        ("bf16-true", {"dtype": torch.bfloat16}),
        ("bf16-mixed", {"autocast": torch.bfloat16}),
        ("16-mixed", {"autocast": torch.float16, "scaler": True}),
    ],
)
def test_weights_equal_those_of_a_loop_by_hand(precision, options):
    scaler = torch.amp.GradScaler(DEVICE) if options.pop("scaler", False) else None
    assert_equal(fit(precision=precision), by_hand(Net(), scaler=scaler, **options))


class Overflows(Net):
    """The gradients of one step overflow in float16."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.before = self.net[0].weight.detach().clone()
        return loss * 1e9 if batch_idx == 5 else loss * 1e-3


def test_16_mixed_skips_a_step_that_overflows():
    skipped = []

    class Counts(Overflows):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if torch.equal(self.before, self.net[0].weight):
                skipped.append(batch_idx)

    one = trainer(precision="16-mixed", max_epochs=1)
    one.fit(Counts(), loader())
    assert 5 in skipped
    assert len(skipped) < 8
    assert one.callback_metrics["skipped_steps"] == len(skipped)
