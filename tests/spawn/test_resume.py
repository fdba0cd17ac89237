"""A run with ddp_spawn resumes as if it had not stopped, and the caller gets its results."""

import pytest
import torch

from geartrain.callbacks import EarlyStopping

from .models import Net, loader, trainer


@pytest.mark.timeout(300)  # four runs of two processes each
def test_a_resumed_run_equals_one_without_a_stop(tmp_path):
    def train(name, epochs, path=None):
        patient = EarlyStopping("val_loss", patience=50)
        one = trainer(max_epochs=epochs, output=tmp_path / name, plugins=[patient], seed=3)
        module = Net()
        one.fit(module, loader(), loader(20), ckpt_path=path)
        return one, module, patient

    whole, module, patient = train("whole", 2)
    train("first", 1)
    rest, again, patience = train("first", 2, "last")
    assert all(
        torch.equal(value, module.state_dict()[name]) for name, value in again.state_dict().items()
    )
    mine, theirs = (one.run.optimizers[0].state_dict() for one in (rest, whole))
    assert mine["param_groups"] == theirs["param_groups"]
    for index, state in mine["state"].items():
        for name, value in state.items():
            other = theirs["state"][index][name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    assert (rest.global_step, rest.current_epoch) == (whole.global_step, whole.current_epoch)
    assert rest.callback_metrics == whole.callback_metrics
    assert patience.state_dict() == patient.state_dict()

    done, same, _ = train("first", 2, "auto")  # trains nothing, and brings back the end
    assert all(torch.equal(value, same.state_dict()[n]) for n, value in again.state_dict().items())
    assert (done.global_step, done.callback_metrics) == (rest.global_step, rest.callback_metrics)
