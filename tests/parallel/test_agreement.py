"""A rank that changes alone what ranks have in common ends the run with its name."""

import pytest
import torch
from small_models import Net, loader

from geartrain import TrainingError, hookimpl
from geartrain.testing import run_plugin
from geartrain_parallel.agreement import digest


class Alone:
    """Calls ``change(run)`` on one rank: before training, or after the last step of the epoch."""

    def __init__(self, change, rank, before=False):
        self.change, self.rank, self.before = change, rank, before

    @hookimpl
    def on_train_start(self, run):
        if self.before and run.world.rank == self.rank:
            self.change(run)

    @hookimpl
    def on_step_end(self, run):
        if not self.before and (run.world.rank, run.step) == (self.rank, 3):
            self.change(run)


def add_to_a_weight(run):
    with torch.no_grad():
        run.module.layers[0].weight[1, 2] += 1e-6


def past_the_version_counter(run):
    run.module.layers[2].bias.data.mul_(2)


def exchange_weights(run):
    weights = run.module.layers[0].weight.detach().view(-1)
    weights[:4] = weights[[2, 3, 0, 1]]


def halve_the_rate(run):
    run.optimizers[0].param_groups[0]["lr"] /= 2


def other_momentum(run):
    run.optimizers[0].param_groups[0]["momentum"] = 0.9


def freeze(run):
    run.module.layers[0].bias.requires_grad_(False)


CHANGES = {
    add_to_a_weight: "the weight layers.0.weight",
    past_the_version_counter: "the weight layers.2.bias",
    exchange_weights: "the weight layers.0.weight",
    halve_the_rate: "lr of group 0 of optimizer 0 (SGD) is 0.05, not 0.1",
    other_momentum: "momentum of group 0 of optimizer 0 (SGD) is 0.9, not 0",
    freeze: "requires_grad of layers.0.bias is False, not True",
}


SETTINGS = [change for change in CHANGES if "the weight" not in CHANGES[change]]


@pytest.mark.parametrize(
    ("change", "before"),
    [*((change, False) for change in CHANGES), *((change, True) for change in SETTINGS)],
)
def test_a_change_on_one_rank_is_an_error_on_all_with_its_name(change, before):
    results = fitted(Alone(change, 1, before))
    for result in results:
        assert type(result.error) is TrainingError
        assert str(result.error).startswith("rank 1 differs from rank 0: ")
        assert CHANGES[change] in str(result.error)
        assert result.trainer.global_step == (0 if before else 3)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_weights_that_a_hook_sets_are_those_of_rank_0_as_in_one_process(hook):
    def init(module):
        generator = torch.Generator().manual_seed(module.global_rank)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, generator=generator)

    class Initialised(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 0

    setattr(Initialised, hook, init)
    results = [*run_plugin(ranks=3, module=Initialised(), data=loader(), max_epochs=2)]
    results += run_plugin(ranks=1, module=Initialised(), data=loader(), max_epochs=2)
    weights = [result.module.state_dict() for result in results]
    assert all(torch.equal(w[name], weights[-1][name]) for w in weights for name in w)


def test_of_three_ranks_the_one_that_differs_from_the_others_is_named():
    results = fitted(Alone(halve_the_rate, 0, before=True), ranks=3)
    assert all(str(r.error).startswith("rank 0 differs from rank 1: lr of ") for r in results)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_all_ranks_change_is_no_error(change):
    class Together:
        @hookimpl
        def on_step_end(self, run):
            if run.step == 2:
                change(run)

    assert [result.error for result in fitted(Together())] == [None, None]


def fitted(plugin, ranks=2):
    return run_plugin(plugin, ranks=ranks, module=Net(), data=loader(), check=False)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.bool],
)
@pytest.mark.parametrize("numel", [0, 1, 7, 64])
def test_the_digest_is_of_the_bits_wherever_they_are(dtype, numel):
    values = torch.arange(numel).to(dtype)
    shifted = torch.cat([torch.zeros(1, dtype=dtype), values])[1:]
    spread = torch.stack([values, values], dim=1)[:, 0]
    assert digest(values) == digest(shifted) == digest(spread)
    if numel:
        shifted = shifted.clone()
        shifted[-1] = shifted[-1] == 0
        assert digest(shifted) != digest(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("distance", [1, 2, 4, 255, 1024, 2048, 2**20, 2**21 - 2])
def test_two_weights_that_change_places_have_another_digest(dtype, distance):
    values = torch.zeros(2**21, dtype=dtype)
    for first, second in ((1.0, 0.0), (1.0, -1.0), (2.0, 1.0)):
        if torch.tensor(first, dtype=dtype) == torch.tensor(second, dtype=dtype):
            continue
        values[1], values[1 + distance] = first, second
        before = digest(values)
        values[1], values[1 + distance] = second, first
        assert digest(values) != before
