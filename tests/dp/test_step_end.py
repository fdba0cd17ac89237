"""The same ``*_step_end`` under single and dp: a loss over the whole batch."""

import pytest
import torch
from torch.utils.data import DataLoader

from .cases import Contrastive, Curve, dp, one_trainer, samples, weights


def contrastive(strategy, devices, batch_size=7):
    module, curve = Contrastive(), Curve("loss_step")
    trainer = one_trainer(strategy=strategy, devices=devices, plugins=[curve], max_epochs=2)
    trainer.fit(
        module, DataLoader(samples(), batch_size=batch_size), DataLoader(samples(20), batch_size=8)
    )
    fitted = trainer.run.metrics
    tested = trainer.test(module, DataLoader(samples(20), batch_size=8))
    return {**fitted, **tested[0]}, curve.values, weights(module)


def test_a_loss_over_the_whole_batch_is_that_of_one_device():
    devices = 4
    metrics, curve, expected = contrastive("single", 1)
    theirs, their_curve, trained = contrastive("dp", devices)
    parts = {name for name in metrics if name.endswith("parts")}
    assert len(parts) == 3
    assert all(metrics[name] == 1 < theirs[name] <= devices for name in parts)
    assert len(curve) == 14
    assert their_curve == pytest.approx(curve, rel=1e-6)
    for name in metrics.keys() - parts:
        assert theirs[name] == pytest.approx(metrics[name], rel=1e-6), name
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-6, atol=1e-7)


def test_step_end_gets_the_parts_outputs_in_order():
    class Ordered(Contrastive):
        def validation_step(self, batch, batch_idx):
            return batch[0]

        def validation_step_end(self, outputs):
            seen.append([len(output) for output in outputs])
            assert torch.equal(torch.cat(outputs), data.tensors[0])

    seen, data = [], samples(8)
    dp(3).validate(Ordered(), DataLoader(data, batch_size=8))
    assert seen == [[3, 3, 2]]


def test_attributes_that_step_end_sets_on_the_module_stay():
    class Keeping(Contrastive):
        batches = 0

        def training_step_end(self, outputs):
            self.batches += 1
            return super().training_step_end(outputs)

    module = Keeping()
    dp().fit(module, DataLoader(samples(), batch_size=8))
    assert module.batches == 6
