"""Manual optimisation on two ranks: as one process on the whole batch, under ddp and under strategies that know nothing of it."""

import pytest
import torch

from .cases import samples
from .manual import STEPS, by_hand
from .ranks import failure, results

STRATEGIES = """
from manual import STEPS, Two, on_ranks
import warnings
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Joins:
    @hookimpl
    def setup_process_group(self, run):
        place = run.place
        dist.init_process_group("gloo", store=run.store, rank=place.rank, world_size=place.size)
        return gt.World(place.rank, place.size, place.local_rank, place.local_size, place.node_rank)


class Wraps(Joins):
    '''A strategy of someone else's, whose gradients are reduced in its wrapper's backward.'''

    @hookimpl
    def wrap_model(self, run, model):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    @hookimpl
    def reduce_gradients(self): ...


class Reduces(Joins):
    '''One that reduces in its hook.'''

    @hookimpl
    def reduce_gradients(self, run):
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= run.world.size


"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """strategy -> case -> weights, for each rank."""
    body = (
        STRATEGIES
        + """
found = {}
for name, make in {"ddp": lambda: "ddp", "wraps": Wraps, "reduces": Reduces}.items():
    for how in STEPS:
        trainer = one_trainer(strategy=make(), devices=2, max_epochs=1)
        found[name, how] = on_ranks(how, trainer, samples())
keep(trainer, found=found)
"""
    )
    return [kept["found"] for kept in results(tmp_path_factory.mktemp("manual"), body, timeout=110)]


@pytest.fixture(scope="module")
def references():
    return {how: by_hand(how, samples()) for how in STEPS}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("strategy", ["ddp", "wraps", "reduces"])
def test_two_ranks_train_as_one_process_does(two_ranks, references, strategy, how):
    first, second = (kept[strategy, how] for kept in two_ranks)
    for key, expected in references[how].items():
        torch.testing.assert_close(first[key], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(first[key], second[key]), f"{key} differs between ranks"


@pytest.fixture(scope="module")
def one_script(tmp_path_factory):
    body = (
        STRATEGIES
        + """
class Sees(Two):
    def __init__(self, overflow=False, own=False):
        super().__init__("not toggled")
        self.overflow, self.own, self.values = overflow, own, []

    def on_after_backward(self):
        self.values.append(self.a.weight.grad.clone())

    def training_step(self, batch, batch_idx):
        a, b = self.optimizers()
        loss = self.loss(batch, self.trainer.global_rank) * 0.01
        if self.overflow and batch_idx == 1 and self.trainer.global_rank == 1:
            loss = loss * float("inf")
        a.zero_grad()
        self.zero_grad()
        loss.backward() if self.own else self.manual_backward(loss)
        a.step()
        self.log("unused", float(self.unused.weight.grad is None))


def train(module, **options):
    trainer = ddp(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(samples(), batch_size=4))
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    return weights, module.values, dict(trainer.callback_metrics), [str(one.message) for one in caught], trainer


*found, trainer = train(Sees())
*overflowed, _ = train(Sees(overflow=True), precision="16-mixed")
*own, _ = train(Sees(own=True))
keep(trainer, plain=found, overflowed=overflowed, own=own)
"""
    )
    return results(tmp_path_factory.mktemp("script"), body, timeout=90)


def test_gradients_are_averaged_when_on_after_backward_is_called(one_script):
    (_, first, metrics, _), (_, second, _, _) = (kept["plain"] for kept in one_script)
    assert len(first) == 6
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    assert metrics["unused"] == 1.0  # what no rank used has no gradient: Adam would move it by zeros, too


def test_an_overflow_on_one_rank_skips_the_step_on_all(one_script):
    (first, _, metrics, _), (second, _, _, _) = (kept["overflowed"] for kept in one_script)
    assert metrics["skipped_steps"] == 1
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.isfinite(value).all() for value in first.values())


def test_a_backward_past_manual_backward_is_warned_of(one_script):
    for kept in one_script:
        assert sum("the ranks' weights drift apart" in one for one in kept["own"][3]) == 1
        assert not any("drift apart" in one for one in kept["plain"][3])


# --- refused -------------------------------------------------------------------------------------------------------------


def test_a_plugin_that_reduces_buckets_is_refused_before_a_rank_starts(tmp_path):
    printed = failure(
        tmp_path,
        STRATEGIES
        + """
class Buckets:
    @hookimpl
    def reduce_bucket(self, run, bucket): ...

print("begins", flush=True)
ddp(plugins=[Buckets()]).fit(Two("toggled"), DataLoader(samples(), batch_size=4))
""",
    )
    assert "Buckets: its reduce_bucket would never be called" in printed
    assert printed.count("begins") == 1


def test_buckets_are_no_matter_of_an_evaluation(tmp_path):
    found = results(
        tmp_path,
        STRATEGIES
        + """
class Buckets:
    @hookimpl
    def reduce_bucket(self, run, bucket): ...

class Validates(Two):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch, 0))

trainer = ddp(plugins=[Buckets()])
keep(trainer, found=trainer.validate(Validates("toggled"), DataLoader(samples(), batch_size=4)))
""",
    )
    assert all("loss" in kept["found"][0] for kept in found)


def test_ranks_that_nobody_averages_for_are_an_error(tmp_path):
    printed = failure(
        tmp_path,
        STRATEGIES
        + """
class Alone:
    '''It answers collectives without a group of torch.distributed.'''

    @hookimpl
    def setup_process_group(self, run):
        place = run.place
        self.run = run
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

one_trainer(strategy=Alone(), devices=2).fit(Two("toggled"), DataLoader(samples(), batch_size=4))
""",
    )
    assert "in manual optimisation nobody would average gradients" in " ".join(printed.split())


def test_sparse_gradients_are_refused(tmp_path):
    printed = failure(
        tmp_path,
        STRATEGIES
        + """
class Sparse(gt.Module):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.table(torch.tensor([0, 1])).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

ddp().fit(Sparse(), DataLoader(samples(), batch_size=4))
""",
    )
    assert "sparse gradients cannot be averaged" in printed
