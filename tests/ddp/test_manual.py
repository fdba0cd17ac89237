"""Manual optimisation on two ranks trains like one process on the whole batch.

Tested under ddp and under strategies without support for manual optimisation.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from several_ranks import failed, kept_by, results
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain.parallel import ProcessGroupStrategy, SeveralRanks, launch, shard

from .cases import ddp, one_trainer, samples
from .manual import STEPS, Two, by_hand, on_ranks


class Joins(ProcessGroupStrategy):
    @hookimpl
    def setup_process_group(self, run):
        place = run.cluster
        dist.init_process_group("gloo", store=run.store, rank=place.rank, world_size=place.size)
        return gt.World(place.rank, place.size, place.local_rank, place.local_size, place.node_rank)


class Wraps(Joins):
    """A third-party strategy whose wrapper reduces gradients in backward."""

    @hookimpl
    def wrap_model(self, run, model):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    @hookimpl
    def reduce_gradients(self): ...


STRATEGIES = {"ddp": lambda: "ddp", "wraps": Wraps}


def train_in_each_way():
    """Return weights by strategy and case."""
    trainers = {
        name: lambda make=make: one_trainer(strategy=make(), devices=2)
        for name, make in STRATEGIES.items()
    }
    return {
        (name, how): on_ranks(how, trainer(), samples())
        for name, trainer in trainers.items()
        for how in STEPS
    }


two_ranks = kept_by(train_in_each_way)


@pytest.fixture(scope="module")
def references():
    return {how: by_hand(how, samples()) for how in STEPS}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_as_one_process_does(two_ranks, references, strategy, how):
    first, second = (kept[strategy, how] for kept in two_ranks)
    for key, expected in references[how].items():
        torch.testing.assert_close(first[key], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(first[key], second[key]), f"{key} differs between ranks"


class Sees(Two):
    def __init__(self, own=False):
        super().__init__("not toggled")
        self.own, self.values = own, []

    def on_after_backward(self):
        self.values.append(self.a.weight.grad.clone())

    def training_step(self, batch, batch_idx):
        a, _ = self.optimizers()
        loss = self.loss(batch, self.trainer.global_rank)
        a.zero_grad()
        self.zero_grad()
        loss.backward() if self.own else self.manual_backward(loss)
        a.step()
        self.log("unused", float(self.unused.weight.grad is None))


def train(own):
    module, trainer = Sees(own), ddp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(gt.TrainingError, match="differs from") if own else nullcontext():
            trainer.fit(module, DataLoader(samples(), batch_size=4))
    return module.values, dict(trainer.run.metrics), [str(one.message) for one in caught]


def train_plainly_and_past():
    return {"plain": train(own=False), "own": train(own=True)}


one_script = kept_by(train_plainly_and_past)


def test_gradients_are_averaged_when_on_after_backward_is_called(one_script):
    (first, metrics, _), (second, _, _) = (kept["plain"] for kept in one_script)
    assert len(first) == 6
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    # Parameters that no rank used have no gradient: Adam would change them even with zeros.
    assert metrics["unused"] == 1.0


def test_a_backward_without_manual_backward_gives_a_warning_and_an_error(one_script):
    for kept in one_script:
        assert sum("the ranks' weights drift apart" in one for one in kept["own"][2]) == 1
        assert not any("drift apart" in one for one in kept["plain"][2])


# --- refused -------------------------------------------------------------------------------------


class Buckets:
    @hookimpl
    def reduce_bucket(self, run, bucket): ...


def test_a_plugin_that_reduces_buckets_is_refused_before_a_rank_starts():
    with pytest.raises(gt.UsageError, match="Buckets: its reduce_bucket would never be called"):
        ddp(plugins=[Buckets()]).fit(Two("toggled"), DataLoader(samples(), batch_size=4))


class Validates(Two):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch, 0))


def validate_with_buckets():
    return ddp(plugins=[Buckets()]).validate(
        Validates("toggled"), DataLoader(samples(), batch_size=4)
    )


def test_an_evaluation_accepts_a_plugin_that_reduces_buckets(tmp_path):
    assert all("loss" in found for (found,) in results(tmp_path, validate_with_buckets))


class Alone:
    """A strategy that implements collectives without a group of torch.distributed."""

    launch, shard_dataloader = (staticmethod(hookimpl(function)) for function in (launch, shard))

    @hookimpl
    def teardown_process_group(self): ...

    @hookimpl
    def make_coordinator(self):
        return SeveralRanks()

    @hookimpl
    def all_gather(self, tensor):
        return tensor.expand(2, *tensor.shape)

    @hookimpl
    def setup_process_group(self, run):
        place = run.cluster
        run.store.set(f"came {place.rank}", "")
        run.store.wait(["came 0", "came 1"])
        return gt.World(place.rank, place.size, place.local_rank, place.local_size, place.node_rank)

    @hookimpl
    def log_sync(self, run, values):
        return values.expand(2, -1)

    @hookimpl
    def broadcast(self, obj):
        return obj

    @hookimpl
    def barrier(self): ...

    @hookimpl
    def wrap_model(self, model):
        return model


def train_without_averaging():
    one_trainer(strategy=Alone(), devices=2).fit(
        Two("toggled"), DataLoader(samples(), batch_size=4)
    )


def test_ranks_whose_gradients_are_not_averaged_are_an_error(tmp_path):
    assert any(
        "so manual optimisation would average no gradients" in rank.error
        for rank in failed(tmp_path, train_without_averaging)
    )
