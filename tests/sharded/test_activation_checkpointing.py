"""activation_checkpointing trains the same weights, and keeps fewer activations."""

import pytest
import torch
from regression import Net, one_trainer, samples
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_sharded.activation_checkpointing import ActivationCheckpointing
from geartrain_tools.tuner.finder import left_out


class Block(nn.Module):
    """Two layers with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        return x + self.layers(x)


class Deep(Net):
    """Counts the bytes that autograd keeps for the backward."""

    def __init__(self, norm=False):
        super().__init__(optimizer="adam", norm=norm)
        self.deep = nn.Sequential(*[Block() for _ in range(4)])
        self.kept = 0

    def training_step(self, batch, batch_idx):
        def keep(tensor):
            self.kept += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return super().training_step(batch, batch_idx)


def train(**options):
    module = Deep()
    given = {"activation_checkpointing": options} if options else {}
    trainer = one_trainer(seed=1, plugins=[*given], plugin_options=given)
    trainer.fit(module, DataLoader(samples(), 8), DataLoader(samples(8), 8))
    return module


def test_weights_are_equal_bit_for_bit_and_less_is_kept():
    plain, half, most = train(), train(units="Block", every=2), train(units=["Block"])
    for module in (half, most):
        for name, value in plain.state_dict().items():
            assert torch.equal(module.state_dict()[name], value), name
    assert most.kept < half.kept < plain.kept


def test_the_module_is_as_before_after_a_fit():
    assert not any("forward" in vars(part) for part in train(units="Block").modules())


def test_two_plugins_leave_a_forward_that_the_user_has_set():
    module = Deep()
    module.deep[1].forward = own = module.deep[1].layers.forward
    two = [ActivationCheckpointing("Block"), ActivationCheckpointing(["Block"], every=2)]
    one_trainer(plugins=two).fit(module, DataLoader(samples(), 8))
    changed = [vars(part) for part in module.modules() if "forward" in vars(part)]
    assert [attributes["forward"] for attributes in changed] == [own]


def test_the_batch_size_is_tuned_with_it():
    given = {"activation_checkpointing": {"units": "Block"}}
    assert left_out(one_trainer(plugins=[*given], plugin_options=given)) == []


class Fails(Deep):
    def on_train_epoch_end(self):
        raise KeyError("mine")


def test_the_module_is_as_before_after_an_error():
    module, options = Fails(), {"activation_checkpointing": {"units": "Block"}}
    trainer = one_trainer(plugins=[*options], plugin_options=options)
    with pytest.raises(KeyError):
        trainer.fit(module, DataLoader(samples(), 8))
    assert not any("forward" in vars(part) for part in module.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": "Blok"}, "Deep has no part of class Blok. Did you mean 'Block'?"),
        ({"units": "Block", "every": 0}, "every=0 must be at least 1"),
        ({"units": "BatchNorm1d"}, "BatchNorm1d has BatchNorm, whose statistics would count"),
    ],
)
def test_options(options, message):
    given = {"activation_checkpointing": options}
    with pytest.raises(gt.UsageError) as found:
        one_trainer(plugins=[*given], plugin_options=given).fit(
            Deep(norm=True), DataLoader(samples(), 8)
        )
    assert message in str(found.value)
