"""Two ranks: order of an algorithm's calls, manual optimisation, a session, overflows, leaks."""

import os
import threading
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist
from cases import Net, bagua, one_trainer, samples
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain.checkpoint.checkpoints import checkpoint_state
from geartrain_bagua import BaguaStrategy
from geartrain_bagua.algorithms.asynchronous import Asynchronous
from geartrain_bagua.algorithms.decentralized import Decentralized
from geartrain_bagua.algorithms.gradient_allreduce import GradientAllReduce

rank, found = int(os.environ.get("RANK", 0)), {}


class Apart(Net):
    only_rank_1 = False

    def __init__(self, **options):
        super().__init__(**options)
        torch.manual_seed(rank)
        self.last.reset_parameters()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
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


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


for kind in ("adam", "adam of rank 1"):
    module, trainer = Apart(optimizer="adam"), bagua()
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


strategy = BaguaStrategy(algorithm=Watched(), bucket_bytes=100)
options = {"accumulate_grad_batches": 3, "num_sanity_val_steps": 1}
trainer = one_trainer(
    strategy=strategy, devices=2, output=f"out-{rank}", plugins=[Plugin()], **options
)
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
# Backward computes the first layer's gradients last; it waits there until others are reduced.
module.first.bias.register_hook(lambda gradient: waited.append(Signals.reduced.wait(20)))
one_trainer(strategy=BaguaStrategy(Signals(), bucket_bytes=100), devices=2, max_steps=3).fit(
    module, DataLoader(samples(), 4)
)


class Early(Decentralized):
    started, continued, seen = threading.Event(), threading.Event(), []

    def _exchange(self, flat, among, number):
        self.started.set()
        self.seen.append(("training has continued", self.continued.wait(20)))
        super()._exchange(flat, among, number)


class Looks(Net):
    def on_train_batch_start(self, batch, batch_idx):
        Early.started.clear()
        Early.continued.clear()

    def training_step(self, batch, batch_idx):
        Early.seen.append(("exchange has begun", Early.started.wait(20)))
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        Early.continued.set()


one_trainer(strategy=BaguaStrategy(Early(hierarchical=False)), devices=2, max_steps=1).fit(
    Looks(), DataLoader(samples(), 4)
)
found["early"] = sorted(Early.seen)


class Saves:
    @hookimpl
    def on_step_end(self, run):
        if run.step % 2 == 0:
            checkpoint_state(run, run.epoch)
            saved.append(weights(run.module))


saved = []
trainer = bagua(
    strategy={"algorithm": "async", "sync_interval_ms": 1}, max_steps=4, plugins=[Saves()]
)
trainer.fit(Net(), DataLoader(samples(), 4))
found["saved in on_step_end"] = list(saved)


class Groups(Asynchronous):
    def set_up(self, context):
        super().set_up(context)
        found["groups of async"] = [
            context.everyone.group is dist.group.WORLD,
            context.everyone.ranks,
        ]


def threads():
    return sorted(
        thread.name for thread in threading.enumerate() if thread.name.startswith("geartrain-bagua")
    )


class Threads(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        found["threads of async"].append(threads())


found["threads of async"], found["leaks of async"] = [], []
trainer = one_trainer(strategy=BaguaStrategy(Groups(sync_interval_ms=1)), devices=2, max_steps=3)
for _ in range(2):
    trainer.fit(Threads(), DataLoader(samples(), 4))
    found["leaks of async"].append(threads())


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
torch.save(found, f"kept-{rank}.pt")
