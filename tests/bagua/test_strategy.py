"""Two ranks of bagua's gradient_allreduce train as one process does; what an algorithm is asked, and when; what is refused."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_bagua import Algorithm, BaguaStrategy
from geartrain_bagua.algorithms.gradient_allreduce import GradientAllReduce

from .cases import CASES, Net, bagua, one_trainer, samples, train
from .ranks import results, script


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """case -> (loss curve, weights), for each rank; all cases in one run of two processes."""
    body = """
found = {}
for name in CASES:
    trainer, curve, weights = train(name, ranks=2)
    found[name] = (curve, weights)
keep(trainer, found=found)
"""
    return [kept["found"] for kept in results(tmp_path_factory.mktemp("cases"), body)]


@cache
def one_process(name):
    _, curve, weights = train(name)
    return curve, weights


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(two_ranks, name):
    curve, weights = one_process(name)
    theirs, trained = two_ranks[0][name]
    assert len(curve) > 1
    assert theirs == pytest.approx(curve, rel=1e-5)
    # LBFGS divides by small differences of gradients, which makes rounding larger.
    rtol, atol = (1e-4, 1e-5) if name == "lbfgs" else (1e-5, 1e-6)
    for key, expected in weights.items():
        torch.testing.assert_close(trained[key], expected, rtol=rtol, atol=atol)
        assert torch.equal(trained[key], two_ranks[1][name][1][key]), f"{key} differs between ranks"


# --- more of it, in one script -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_script(tmp_path_factory):
    """Several runs in one script of two ranks."""
    body = """
import torch.distributed as dist
from geartrain_bagua import Algorithm
from geartrain_bagua.algorithms.gradient_allreduce import GradientAllReduce
import threading
from contextlib import contextmanager
from geartrain.checkpoint import checkpoint_state
from geartrain_bagua.algorithms.asynchronous import Asynchronous
from geartrain_bagua.algorithms.decentralized import Decentralized

rank, found = int(os.environ.get("RANK", 0)), {}


class Apart(Net):
    only_rank_1 = False

    def __init__(self, **options):
        super().__init__(**options)
        torch.manual_seed(rank)
        self.last.reset_parameters()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.optimizer == "adam" and (rank or not self.only_rank_1):
            for parameter in self.parameters():
                optimizer.state[parameter] = {
                    "step": torch.tensor(5.0 + rank), "exp_avg": torch.rand_like(parameter), "exp_avg_sq": torch.rand_like(parameter)
                }
            if not self.only_rank_1:  # otherwise the groups are the same
                optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
        return optimizer


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


for kind in ("sgd", "adam", "adam of rank 1"):
    module, trainer = Apart(optimizer=kind.split()[0]), bagua()
    module.only_rank_1 = "rank" in kind
    trainer.fit(module, DataLoader(samples(), 4))
    found["apart", kind] = weights(module)

module = Net()
trainer = bagua(precision="16-mixed", max_epochs=2, gradient_clip_val=0.001)
trainer.fit(module, DataLoader(samples(), 4))
found["16-mixed"] = (weights(module), weights(Net()))


class Overflows(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and rank == 1 else loss


module = Overflows()
skipping = bagua(precision="16-mixed")
skipping.fit(module, DataLoader(samples(), 4))
found["skipped"] = (float(skipping.callback_metrics["skipped_steps"]), weights(module))


class Watched(GradientAllReduce):
    calls = []
    threads = set()

    def set_up(self, context):
        super().set_up(context)
        self.calls.append(("set_up", len(context.buckets), context.everyone.ranks, context.run.world.rank))
    def start_step(self):
        self.calls.append("start_step")
    @contextmanager
    def computing(self):
        self.calls.append("computing")
        yield
        self.calls.append("computed")
    def reduce(self, bucket):
        self.threads.add(threading.current_thread().name)
        self.calls.append(bucket.index)
        super().reduce(bucket)
    def end_backward(self):
        self.calls.append("end_backward")
    def end_step(self):
        self.calls.append("end_step")
    def pause(self):
        self.calls.append("pause")
    def resume(self):
        self.calls.append("resume")
    def close(self, failed):
        self.calls.append(("close", failed))
    def state_dict(self):
        return {"n": 3}


class Hooks(Net):
    def on_train_batch_start(self, batch, batch_idx):
        Watched.calls.append("batch")
    def on_train_batch_end(self, outputs, batch, batch_idx):
        Watched.calls.append("end of batch")
    def on_before_optimizer_step(self, optimizer):
        Watched.calls.append("optimizer")


class Plugin:
    @hookimpl
    def on_step_end(self):
        Watched.calls.append("on_step_end")


strategy = BaguaStrategy(algorithm=Watched(), bucket_bytes=100)
options = {"accumulate_grad_batches": 3, "num_sanity_val_steps": 1}
trainer = one_trainer(strategy=strategy, devices=2, output=f"out-{rank}", plugins=[Plugin()], **options)
trainer.fit(Hooks(optimizer="two"), DataLoader(samples(), 8), DataLoader(samples(8), 4))
found["calls"], found["threads"] = list(Watched.calls), set(Watched.threads)
found["state"] = strategy.state_dict()
threads = [thread.name for thread in threading.enumerate() if "bagua" in thread.name]
found["left"] = (threads, dist.is_initialized(), hasattr(strategy.algorithm, "context"))

Watched.calls.clear()
lbfgs = one_trainer(strategy=strategy, devices=2, max_steps=1)
lbfgs.fit(Net(optimizer="lbfgs"), DataLoader(samples(), 4))
found["calls of lbfgs"] = list(Watched.calls)


class Signals(GradientAllReduce):
    reduced = threading.Event()

    def reduce(self, bucket):
        super().reduce(bucket)
        self.reduced.set()


class Waits(Net):
    def on_before_backward(self, loss):
        Signals.reduced.clear()

    def on_after_backward(self):
        found["overlapped"] = found["overlapped"] and waited[-1]


waited, found["overlapped"] = [], True
module = Waits()
# The first layer's gradients are the last: backward waits there until others have been reduced.
module.first.bias.register_hook(lambda gradient: waited.append(Signals.reduced.wait(20)))
one_trainer(strategy=BaguaStrategy(Signals(), bucket_bytes=100), devices=2, max_steps=3).fit(module, DataLoader(samples(), 4))


class Early(Decentralized):
    started, going_on, seen = threading.Event(), threading.Event(), []

    def _exchange(self, flat, among, number):
        self.started.set()
        self.seen.append(("training went on", self.going_on.wait(20)))
        super()._exchange(flat, among, number)


class Looks(Net):
    def on_train_batch_start(self, batch, batch_idx):
        Early.started.clear()
        Early.going_on.clear()

    def training_step(self, batch, batch_idx):
        Early.seen.append(("exchange has begun", Early.started.wait(20)))
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        Early.going_on.set()


one_trainer(strategy=BaguaStrategy(Early(hierarchical=False)), devices=2, max_steps=1).fit(Looks(), DataLoader(samples(), 4))
found["early"] = sorted(Early.seen)


class Saves:
    @hookimpl
    def on_step_end(self, run):
        if run.step % 2 == 0:
            checkpoint_state(run, run.epoch)
            saved.append(weights(run.module))


saved = []
trainer = bagua(strategy={"algorithm": "async", "sync_interval_ms": 1}, max_steps=4, plugins=[Saves()])
trainer.fit(Net(), DataLoader(samples(), 4))
found["saved in on_step_end"] = list(saved)


class Groups(Asynchronous):
    def set_up(self, context):
        super().set_up(context)
        found["groups of async"] = [context.everyone.group is dist.group.WORLD, context.everyone.ranks]


def threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("geartrain-bagua"))


class Threads(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        found["threads of async"].append(threads())


found["threads of async"], found["left of async"] = [], []
trainer = one_trainer(strategy=BaguaStrategy(Groups(sync_interval_ms=1)), devices=2, max_steps=3)
for _ in range(2):
    trainer.fit(Threads(), DataLoader(samples(), 4))
    found["left of async"].append(threads())


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


module = Manual()
trainer = bagua()
trainer.fit(module, DataLoader(samples(), 4))
found["manual"] = weights(module)

trainer.validate(module, DataLoader(samples(8), 4))
session = gt.Session(accelerator="cpu", strategy="bagua", devices=2, gradient_clip_val=0.05)
session.launch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
model, optimizer = session.setup(model, torch.optim.SGD(model.parameters(), 0.1))
loader = session.setup_dataloaders(DataLoader(samples(), 2))
for i, (x, y) in enumerate(loader):
    with session.no_backward_sync(model, enabled=i % 2 == 0):
        session.backward(nn.functional.mse_loss(model(x), y) / 2)
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
found["session"] = weights(model.module)
session.close()
keep(trainer, found=found)
"""
    return [kept["found"] for kept in results(tmp_path_factory.mktemp("script"), body)]


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("kind", ["sgd", "adam", "adam of rank 1"])
def test_ranks_that_start_apart_are_together_with_their_optimizers(one_script, kind):
    assert torch.equal(*(kept["apart", kind] for kept in one_script))


def test_mixed_precision_scales_reduces_unscales_and_clips(one_script):
    (trained, before), (theirs, _) = (kept["16-mixed"] for kept in one_script)
    assert torch.equal(trained, theirs)
    # 12 steps of gradients of norm 0.001 at most: clipped as what they are, and not as the scaler's 65,536 times that.
    assert 0 < (trained - before).norm() <= 12 * 0.1 * 0.001 * 1.001


def test_an_overflow_on_one_rank_skips_the_step_on_all(one_script):
    (skipped, mine), (also, theirs) = (kept["skipped"] for kept in one_script)
    assert skipped == also == 1
    assert torch.equal(mine, theirs)


def test_an_algorithm_is_asked_in_the_order_of_a_step(one_script):
    for rank, kept in enumerate(one_script):
        begin, *calls = kept["calls"]
        assert begin == ("set_up", 3, (0, 1), rank)
        begun = ["start_step", "computing", "batch", "end of batch", "batch"]
        others = ["computed", "computing", "end of batch", "batch", "computed", "computing", 0, 1, 2, "end_backward"]
        ended = ["optimizer", "optimizer", "end of batch", "computed", "end_step", "computing", "on_step_end", "computed"]
        step = [*begun, *others, *ended]
        # The sanity check, three batches of 8 samples in one window, and one pause for validation and the epoch's checkpoint.
        assert calls == ["pause", "resume", *step, "pause", ("close", False)]
        assert kept["threads"] == {"geartrain-bagua"}
        assert kept["state"] == {"algorithm": "Watched", "state": {"n": 3}}


def test_communication_goes_on_while_backward_does(one_script):
    assert [kept["overlapped"] for kept in one_script] == [True, True]


def test_decentralized_exchanges_from_before_forward_to_after_backward(one_script):
    for kept in one_script:
        assert kept["early"] == [("exchange has begun", True), ("training went on", True)]


def test_asyncs_thread_has_a_group_of_its_own_and_ends_with_each_fit(one_script):
    for kept in one_script:
        assert kept["groups of async"] == [False, (0, 1)]
        assert kept["threads of async"] == [["geartrain-bagua", "geartrain-bagua-async"]] * 6
        assert kept["left of async"] == [[], []]


def test_a_closure_is_one_step_of_several_backwards(one_script):
    calls = one_script[0]["calls of lbfgs"][1:-1]
    evaluation = [0, 1, 2, "end_backward"]
    assert calls == ["start_step", "computing", *evaluation * 4, "computed", "end_step", "computing", "computed"]


def test_async_stops_for_a_checkpoint_that_a_plugin_saves_in_on_step_end(one_script):
    first, second = (kept["saved in on_step_end"] for kept in one_script)
    assert len(first) == 2
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)


def test_nothing_of_a_run_is_left(one_script):
    for kept in one_script:
        assert kept["left"] == ([], False, False)


def test_manual_optimisation_averages(one_script):
    _, weights = one_process("sgd")
    expected = torch.cat([value.flatten() for value in weights.values()])
    for kept in one_script:
        torch.testing.assert_close(kept["manual"], expected, rtol=1e-5, atol=1e-6)


def test_a_session_averages_once_a_step(one_script):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), 0.1), samples().tensors
    for i in range(0, len(x), 8):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[i : i + 8]), y[i : i + 8]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    for kept in one_script:
        torch.testing.assert_close(kept["session"], flat(model), rtol=1e-5, atol=1e-6)


# --- what is refused: one rank has all the same errors -------------------------------------------------------------------


def refused(module, **options):
    with pytest.raises(gt.GeartrainError) as caught:
        bagua(1, **options).fit(module, DataLoader(samples(), 8))
    return str(caught.value)


def test_unused_parameters_are_named():
    told = refused(Net(unused=True))
    assert "2 parameters got no gradient in this step" in told
    assert "extra.weight" in told
    assert "find_unused_parameters=True" in told


def test_a_parameter_that_is_unfrozen_later_is_named():
    class Unfreezes(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.first.requires_grad_(True)

    assert "first.weight got a gradient, but needed none when training began" in refused(Unfreezes(frozen=True))


def test_a_second_backward_is_named():
    class Twice(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss.backward(retain_graph=True)
            return loss

    assert "got its gradient twice in one backward" in refused(Twice())


def zero(gradient):
    return gradient.zero_()


class Changes(Net):
    """Changes gradients after backward; those of two of its parameters are views of one tensor."""

    def __init__(self, change=zero, of=(), **options):
        super().__init__(**options)
        self.change, self.of = change, of
        self.pair = nn.ParameterDict({name: nn.Parameter(torch.ones(32)) for name in ("upper", "lower")})

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + torch.cat([self.pair.upper, self.pair.lower]).square().sum()

    def on_after_backward(self):
        for name in self.of:
            parameter = self.get_parameter(name)
            parameter.grad = self.change(parameter.grad)


@pytest.mark.parametrize("name", ["last.weight", "first.bias", "pair.upper"], ids=["an early one", "of the last bucket", "a view"])
@pytest.mark.parametrize("change", [zero, torch.zeros_like], ids=["in place", "another"])
def test_a_gradient_that_is_changed_after_it_was_sent_is_named(name, change):
    """Its bucket overwrites it: the change would be lost."""
    told = refused(Changes(change, [name]), strategy={"bucket_bytes": 100})
    assert f"the gradient of {name} was changed after it was sent" in told
    assert "Fix: change gradients in on_before_optimizer_step" in told


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_that_nobody_changed_are_not_refused(accumulate):
    bagua(1, accumulate_grad_batches=accumulate, strategy={"bucket_bytes": 100}).fit(Changes(), DataLoader(samples(), 8))


def test_a_gradient_that_is_changed_before_it_is_sent_is_averaged_as_it_is():
    class Early(Net):
        def on_after_backward(self):
            if self.accumulated == 1:
                zero(self.last.weight.grad)

        def on_train_batch_start(self, batch, batch_idx):
            self.accumulated = batch_idx % 2 + 1

    def trained(**options):
        module = Early()
        one_trainer(accumulate_grad_batches=2, max_steps=2, **options).fit(module, DataLoader(samples(), 8))
        return flat(module)

    torch.testing.assert_close(trained(strategy="bagua", devices=1), trained(devices=1))


class Other(Algorithm):
    """An algorithm whose gradients nobody else may average."""


@pytest.mark.parametrize(
    ("strategy", "who"),
    [(BaguaStrategy(Other), "'Other'"), (BaguaStrategy(hierarchical=True), "'gradient_allreduce'"), (BaguaStrategy(average=False), "")],
    ids=["another", "hierarchical", "summed"],
)
def test_manual_optimisation_and_a_session_are_refused_where_core_would_average_otherwise(strategy, who):
    class Manual(Net):
        automatic_optimization = False

    trainer = gt.Trainer(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(gt.UsageError, match=f"the algorithm {who}.*manual optimisation"):
        trainer.fit(Manual(), DataLoader(samples(), 8))
    with pytest.raises(gt.UsageError, match=f"the algorithm {who}.*a Session's own loop"):
        gt.Session(accelerator="cpu", devices=2, strategy=strategy).launch()


def test_manual_optimisation_does_not_ask_an_algorithm_that_was_not_set_up():
    class Computes(GradientAllReduce):
        def computing(self):
            return nullcontext(self.context)

    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
            self.optimizers().step()

    trainer = one_trainer(strategy=BaguaStrategy(Computes), devices=1, accumulate_grad_batches=1)
    trainer.fit(Manual(), DataLoader(samples(), 8))
    assert trainer.global_step == 6


def test_a_state_of_another_algorithm_is_refused_by_name():
    strategy = BaguaStrategy()
    strategy.load_state_dict(strategy.state_dict())
    with pytest.raises(gt.UsageError, match="is of the algorithm 'bytegrad', and this run's is 'gradient_allreduce'"):
        strategy.load_state_dict({"algorithm": "bytegrad", "state": {}})


def test_hooks_that_an_algorithm_has_no_use_for_are_not_there():
    hooks = bagua(1).hooks
    for hook in ("step", "optimizer_step", "on_validation_start"):
        assert not any(choice.kind == "strategy" for choice in hooks.implementers(hook)), hook
    assert hooks.owner("micro_step").kind == hooks.owner("reduce_gradients").kind == "strategy"
    idle = gt.Trainer(accelerator="cpu", devices=1, strategy=BaguaStrategy(Other)).hooks
    assert idle.owner("micro_step").kind == idle.owner("reduce_gradients").kind == "default"


@pytest.mark.parametrize("method", ["configure_ddp", "ddp_device_ids"])
def test_what_a_subclass_overrides_of_ddp_in_vain_is_refused(method):
    mine = type("Mine", (BaguaStrategy,), {method: lambda self, *_: None})
    with pytest.raises(gt.UsageError, match=rf"Mine\.{method} would never be called"):
        mine()


@pytest.mark.parametrize("algorithm", ["decentralized", "low_precision_decentralized", "async"])
def test_an_optimizer_with_a_closure_is_refused_where_ranks_have_weights_of_their_own(algorithm):
    """Each would evaluate its closure another number of times, and the loss in it is the mean over all ranks."""
    told = refused(Net(optimizer="lbfgs"), strategy={"algorithm": algorithm})
    assert "such as LBFGS" in told
    assert "Fix: another optimizer" in told


def test_ddps_own_hook_for_buckets_is_refused(tmp_path):
    class Compresses:
        @gt.hookimpl
        def reduce_bucket(self, run, bucket): ...

    with pytest.raises(gt.UsageError, match=r"reduce_bucket.*implements no known hook"):
        bagua(1, plugins=[Compresses()])


@pytest.mark.slow
def test_a_rank_that_leaves_a_parameter_out_ends_the_run(tmp_path):
    done = script(tmp_path, "bagua().fit(Net(unused=int(os.environ.get('RANK', 0)) == 1), DataLoader(samples(), 4))\n")
    assert done.returncode != 0
    assert "rank 1" in done.printed
    assert "extra.weight" in done.printed
