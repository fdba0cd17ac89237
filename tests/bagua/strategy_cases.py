"""Runs on two ranks: order of an algorithm's calls, manual optimisation, a session, overflows."""

import os
import threading
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain_bagua import BaguaStrategy
from geartrain_bagua.algorithms.asynchronous import Asynchronous
from geartrain_bagua.algorithms.decentralized import Decentralized
from geartrain_bagua.algorithms.gradient_allreduce import GradientAllReduce

from .cases import Net, bagua, one_trainer, samples


def this_rank():
    return int(os.environ["RANK"])


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def loader():
    return DataLoader(samples(), 4)


class Apart(Net):
    """Its optimizer has a state on both ranks, or on rank 1 only."""

    def __init__(self, only_rank_1):
        super().__init__(optimizer="adam")
        self.only_rank_1 = only_rank_1
        torch.manual_seed(this_rank())
        self.last.reset_parameters()

    def configure_optimizers(self):
        optimizer, rank = super().configure_optimizers(), this_rank()
        if rank or not self.only_rank_1:
            for parameter in self.parameters():
                optimizer.state[parameter] = {
                    "step": torch.tensor(5.0 + rank),
                    "exp_avg": torch.rand_like(parameter),
                    "exp_avg_sq": torch.rand_like(parameter),
                }
            if not self.only_rank_1:  # with only_rank_1 the groups are equal
                optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
        return optimizer


class Overflows(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and self.global_rank == 1 else loss


def start_apart_and_overflow():
    found = {}
    for only_rank_1 in (False, True):
        module = Apart(only_rank_1)
        bagua().fit(module, loader())
        found["apart", only_rank_1] = flat(module)
    module = Net()
    bagua(precision="16-mixed", max_epochs=2, gradient_clip_val=0.001).fit(module, loader())
    found["16-mixed"] = (flat(module), flat(Net()))
    module, trainer = Overflows(), bagua(precision="16-mixed")
    trainer.fit(module, loader())
    found["skipped"] = (float(trainer.callback_metrics["skipped_steps"]), flat(module))
    return found


# --- the order of calls ---------------------------------------------------------------------------


class Watched(GradientAllReduce):
    calls: ClassVar = []
    threads: ClassVar = set()

    def set_up(self, context):
        super().set_up(context)
        self.calls.append(
            ("set_up", len(context.buckets), context.everyone.ranks, context.run.world.rank)
        )

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


def watch_the_calls():
    found, strategy = {}, BaguaStrategy(algorithm=Watched(), bucket_bytes=100)
    options = {"accumulate_grad_batches": 3, "num_sanity_val_steps": 1, "plugins": [Plugin()]}
    trainer = one_trainer(strategy=strategy, devices=2, output=f"out-{this_rank()}", **options)
    trainer.fit(Hooks(optimizer="two"), DataLoader(samples(), 8), DataLoader(samples(8), 4))
    found["calls"], found["threads"] = list(Watched.calls), set(Watched.threads)
    found["state"] = strategy.state_dict()
    left = [thread.name for thread in threading.enumerate() if "bagua" in thread.name]
    found["left"] = (left, dist.is_initialized(), hasattr(strategy.algorithm, "context"))
    Watched.calls.clear()
    one_trainer(strategy=strategy, devices=2, max_steps=1).fit(Net(optimizer="lbfgs"), loader())
    found["calls of lbfgs"] = list(Watched.calls)
    return found


# --- communication during computation -------------------------------------------------------------


class Signals(GradientAllReduce):
    reduced = threading.Event()

    def reduce(self, bucket):
        super().reduce(bucket)
        self.reduced.set()


class Waits(Net):
    """Backward computes the first layer's gradients last, and waits until others are reduced."""

    def __init__(self):
        super().__init__()
        self.waited = []
        self.first.bias.register_hook(lambda gradient: self.waited.append(Signals.reduced.wait(20)))

    def on_before_backward(self, loss):
        Signals.reduced.clear()


class Early(Decentralized):
    started, continued, seen = threading.Event(), threading.Event(), []

    def _exchange(self, flat, among, number):
        self.started.set()
        self.seen.append(("training has continued", self.continued.wait(20)))
        super()._exchange(flat, among, number)


class Looks(Net):
    def training_step(self, batch, batch_idx):
        Early.seen.append(("exchange has begun", Early.started.wait(20)))
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        Early.continued.set()


def communicate_while_computing():
    module, strategy = Waits(), BaguaStrategy(Signals(), bucket_bytes=100)
    one_trainer(strategy=strategy, devices=2, max_steps=3).fit(module, loader())
    # Before the fit: the exchange may begin before any method of the step runs.
    Early.started.clear()
    Early.continued.clear()
    Early.seen.clear()
    strategy = BaguaStrategy(Early(hierarchical=False))
    one_trainer(strategy=strategy, devices=2, max_steps=1).fit(Looks(), loader())
    return {"overlapped": module.waited, "early": sorted(Early.seen)}


# --- async ----------------------------------------------------------------------------------------


class Saves:
    def __init__(self):
        self.saved = []

    @hookimpl
    def on_step_end(self, run):
        if run.step % 2 == 0:
            run.checkpoint(run.epoch)
            self.saved.append(flat(run.module))


class Groups(Asynchronous):
    groups: ClassVar = []

    def set_up(self, context):
        super().set_up(context)
        self.groups[:] = [
            context.everyone.group is dist.group.WORLD,
            context.everyone.ranks,
        ]


def threads():
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("geartrain-bagua"))


class Threads(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(threads())


def average_in_a_thread():
    saves, options = Saves(), {"algorithm": "async", "sync_interval_ms": 1}
    bagua(strategy=options, max_steps=4, plugins=[saves]).fit(Net(), loader())
    found = {"saved in on_step_end": saves.saved, "threads": [], "leaks": []}
    strategy = BaguaStrategy(Groups(sync_interval_ms=1))
    trainer = one_trainer(strategy=strategy, devices=2, max_steps=3)
    for _ in range(2):
        module = Threads()
        trainer.fit(module, loader())
        found["threads"] += module.seen
        found["leaks"].append(threads())
    return {**found, "groups": Groups.groups}


# --- loops of the user ----------------------------------------------------------------------------


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def train_in_loops_of_the_user():
    module = Manual()
    trainer = bagua()
    trainer.fit(module, loader())
    trainer.validate(module, DataLoader(samples(8), 4))
    session = gt.Session(accelerator="cpu", strategy="bagua", devices=2, gradient_clip_val=0.05)
    session.launch()
    net = layers()
    model, optimizer = session.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for i, (x, y) in enumerate(session.setup_dataloaders(DataLoader(samples(), 2))):
        with session.no_backward_sync(model, enabled=i % 2 == 0):
            session.backward(nn.functional.mse_loss(model(x), y) / 2)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    session.close()
    return {"manual": flat(module), "session": flat(net)}
