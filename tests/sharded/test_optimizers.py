"""Every optimizer of torch trains parts as one process does, or is refused before training."""

import pytest
import torch
from regression import Net, one_trainer, samples
from several_ranks import results
from torch import optim
from torch.utils.data import DataLoader

import geartrain as gt

from .cases import UNITS

pytestmark = pytest.mark.timeout(120)

#: All but SparseAdam, which refuses gradients that are not sparse.
OPTIMIZERS = sorted(
    {name for name in vars(optim) if isinstance(getattr(optim, name), type)}
    - {"Optimizer", "SparseAdam"}
)
STRATEGIES = {
    "fsdp": UNITS,
    "ddp_sharded": {},
    "tensor_parallel": {"colwise": ["first"], "rowwise": ["second"]},
}
#: Adafactor and Muon compute from whole matrices, LBFGS from all parameters, and torch cannot split
#: an operation of Rprop.
REFUSED = {"Adafactor", "LBFGS", "Muon", "Rprop", "Scaled"}


class Scaled(optim.SGD):
    """Reads the norm of a gradient, which for a DTensor is that of the part."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= float(parameter.grad.norm()) + 1e-6
        return super().step(closure)


class Steps(Net):
    def configure_optimizers(self):
        if self.optimizer == "Scaled":
            return Scaled(self.parameters(), lr=0.01)
        if self.optimizer == "Muon":
            matrices = [p for p in self.parameters() if p.ndim == 2]
            others = [p for p in self.parameters() if p.ndim != 2]
            return [optim.Muon(matrices, lr=0.01), optim.SGD(others, lr=0.01)]
        return getattr(optim, self.optimizer)(self.parameters(), lr=0.01)


def step(strategy, options, devices=2):
    """Return the weights after an epoch, or the error, by optimizer."""
    found = {}
    for name in [*OPTIMIZERS, "Scaled"]:
        module = Steps(name)
        trainer = one_trainer(strategy=strategy, strategy_options=options, devices=devices)
        batch = 6 if strategy in ("fsdp", "ddp_sharded") else 12
        try:
            trainer.fit(module, DataLoader(samples(12), batch))
            found[name] = dict(module.state_dict())
        except gt.UsageError as error:
            found[name] = f"{error} after {trainer.global_step} steps"
    return found


@pytest.fixture(scope="module")
def one_process():
    return step("single", None, 1)


@pytest.mark.parametrize(
    "strategy",
    [s if s == "fsdp" else pytest.param(s, marks=pytest.mark.matrix) for s in STRATEGIES],
)
def test_an_optimizer_trains_as_in_one_process_or_is_refused(tmp_path, strategy, one_process):
    found = results(tmp_path, step, strategy, STRATEGIES[strategy], seconds=110)[0]
    refused = {name for name, result in found.items() if isinstance(result, str)}
    # Under tensor_parallel torch adds up what LBFGS needs of all parts.
    assert refused == REFUSED - ({"LBFGS"} if strategy == "tensor_parallel" else set())
    for name, result in found.items():
        if name in refused:
            assert f"{name} cannot step parameters of which each rank has a part. Fix: " in result
            assert result.endswith("after 0 steps")
        else:
            torch.testing.assert_close(result, one_process[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fast_is_refused_before_any_process_starts(strategy):
    options = {"strategy_options": STRATEGIES[strategy], "devices": 2, "plugins": ["fast"]}
    with pytest.raises(
        gt.UsageError, match=rf"{strategy}\]: .*\[fast\] joins .* Fix: leave fast out"
    ):
        one_trainer(strategy=strategy, **options).fit(Net(), DataLoader(samples(), 6))
