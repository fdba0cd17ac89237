"""``all_gather`` with gradients, and of numbers, on ranks that are threads."""

import pytest
import torch
from regression import Contrast, Net, one_trainer, samples, weights
from threads import on_threads
from torch.utils.data import DataLoader

import geartrain as gt


@pytest.mark.parametrize(
    ("local", "options"), [(True, {}), (False, {"accumulate_grad_batches": 2})]
)
def test_a_contrastive_loss_trains_as_in_one_process(local, options):
    one = Contrast()
    one_trainer(**options).fit(one, DataLoader(samples(), batch_size=8))
    trainer, strategy = on_threads(**options)
    trainer.fit(Contrast(local), DataLoader(samples(), batch_size=4))
    for run in strategy.runs:
        torch.testing.assert_close(weights(run.module), weights(one))


class Gathers(Net):
    """Calls a function of the module on every rank, and keeps the result."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_start(self):
        self.result = self.function(self)


def on_ranks(function):
    trainer, strategy = on_threads()
    trainer.fit(Gathers(function), DataLoader(samples(8), batch_size=4))
    return [run.module.result for run in strategy.runs]


def test_gradients_of_unequal_lengths():
    def gradient(module):
        rank = module.global_rank
        tensor = torch.ones(rank + 1, requires_grad=True)
        first, second = module.all_gather({"x": tensor}, sync_grads=True)["x"]
        (first.sum() * 2 + (second * torch.tensor([1.0, 10.0])).sum() * (rank + 1)).backward()
        return tensor.grad.tolist()

    assert on_ranks(gradient) == [[4.0], [3.0, 30.0]]


def test_numbers_become_tensors():
    result = on_ranks(lambda module: module.all_gather({"n": module.global_rank, "x": [1.5]}))
    assert [one["n"].tolist() for one in result] == [[0, 1]] * 2
    assert [one["x"][0].tolist() for one in result] == [[1.5, 1.5]] * 2


def test_dropped_gradients_are_one_warning():
    with pytest.warns(UserWarning, match=r"the result has none\. Fix: sync_grads=True") as caught:
        on_ranks(lambda module: module.all_gather(module.last.weight))
    assert [one.filename for one in caught if "sync_grads" in str(one.message)] == [__file__]


@pytest.mark.filterwarnings("error:all_gather")
def test_nothing_is_said_without_gradients_to_drop():
    def gather(module):
        with torch.no_grad():
            module.all_gather(module.last.weight)
            module.all_gather(module.last.weight, sync_grads=True)
        return module.all_gather(module.last.weight.detach()).shape

    assert on_ranks(gather) == [(2, 1, 8)] * 2


def test_gradients_on_one_rank_only_are_refused():
    def gather(module):
        return module.all_gather(module.last.weight, sync_grads=module.global_rank == 0)

    with pytest.raises(gt.TrainingError, match="bring other tensors that require gradients"):
        on_ranks(gather)
