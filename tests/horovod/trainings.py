"""One program of three ranks that trains one case after the other.

Each rank records its gradients of each step before and after reduction. ``kept-RANK.pt`` contains
the results of each case by its name in ``CASES``.
"""

import gc
import os
import pickle
import sys
import threading
import time
import warnings
from pathlib import Path

import horovod.torch as hvd
import torch
import torch._dynamo  # which optimizers import
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain import hookimpl
from geartrain_testing.launching import until

RANKS, BATCH, STEPS = int(os.environ.get("RANKS", "3")), 4, 3


def samples():
    random = torch.Generator().manual_seed(1)
    x = torch.randn(RANKS * BATCH * STEPS, 6, generator=random)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


class Net(gt.Module):
    """A model of three layers; most cases use a subclass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    @property
    def rank(self):
        return self.trainer.global_rank

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh())

    def training_step(self, batch, batch_idx):
        x, y = batch
        return mse_loss(self(x), y.to(x.dtype))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneRankOnly(Net):
    """A layer that only rank 1 uses, in the second step, and a layer that no rank uses."""

    def __init__(self):
        super().__init__()
        self.extra, self.unused = nn.Linear(6, 1), nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(batch[0]).mean() if self.rank == 1 and batch_idx == 1 else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)


class Images(Net):
    """A convolution whose weights and gradients are channels last, so not contiguous."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        images = (
            x.reshape(-1, 3, 2, 1).expand(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        return self.conv(images).mean(dim=(1, 2, 3), keepdim=False)[:, None]

    def configure_optimizers(self):
        return torch.optim.SGD(self.conv.parameters(), lr=0.1)


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j, 0.5j, 1, 1, 1]))

    def forward(self, x):
        return super().forward((x * self.turn).abs())


class Words(Net):
    """An embedding with sparse gradients. A rank uses few rows; rank 2 uses none in step two."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 5, sparse=True)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.rank == 2 and batch_idx == 1:
            return loss
        rows = torch.arange(3) + 4 * self.rank
        return loss + self.last(self.table(rows)).square().mean()

    def configure_optimizers(self):
        dense = [parameter for name, parameter in self.named_parameters() if name != "table.weight"]
        return [
            torch.optim.SGD(dense, lr=0.1),
            torch.optim.SparseAdam(self.table.parameters(), lr=0.1),
        ]


class Closes(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=4)


class Buffers(Net):
    """Ranks have different buffers, one of which is not persistent."""

    def setup(self, stage):
        self.register_buffer("kept", torch.full((2,), float(self.rank)))
        self.register_buffer("aside", torch.full((2,), float(self.rank)), persistent=False)


class Unfreezes(Net):
    """The first layer is frozen in the first step and trained from the second step on."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.first.requires_grad_(batch_idx > 0)
        return super().training_step(batch, batch_idx)


class Recomputes(Net):
    """One layer in two reentrant checkpoints: backward adds to its gradient after it was sent."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.first(x).tanh()
        for _ in range(2):
            hidden = checkpoint(lambda h: self.second(h).tanh(), hidden, use_reentrant=True)
        return mse_loss(self.last(hidden), y)


class Leaves(Net):
    """Rank 1 leaves Horovod in the second step's forward, before backward starts on any rank.

    Until Horovod's threads have ended, no rank starts an operation: it might hang with a lock of
    Horovod and the GIL.
    """

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            before = threads()
            Path(f"ready-{self.rank}").touch()
            if self.rank == 1:
                until(
                    lambda: all(Path(f"ready-{rank}").exists() for rank in range(RANKS)),
                    60,
                    "all ranks are ready",
                )
                hvd.shutdown()
            until(lambda: threads() < before, 60, "Horovod has ended")
        return super().training_step(batch, batch_idx)


def threads():
    """Return the number of threads that Python did not start."""
    return len(
        {int(path.name) for path in Path("/proc/self/task").iterdir()}
        - {one.native_id for one in threading.enumerate()}
    )


class Meddles(Net):
    """Rank 1 changes a gradient between backward and reduction."""

    def on_after_backward(self):
        if self.rank == 1:
            self.second.weight.grad.mul_(3)


class Apart(Net):
    """Ranks have optimizers with different rates and states; all must get rank 0's."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1 * (1 + self.rank), weight_decay=0.5)
        for parameter in self.parameters() if self.rank == 0 else ():
            optimizer.state[parameter] = {
                "step": torch.tensor(7.0),
                "exp_avg": torch.full_like(parameter, 0.25),
                "exp_avg_sq": torch.full_like(parameter, 0.5),
            }
        return optimizer


class Fresh(Net):
    """An optimizer without a state: the broadcast must not create one."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def gradients(run):
    """Return each parameter's gradient, as a dense tensor."""
    named = {name: parameter.grad for name, parameter in run.module.named_parameters()}
    return {
        name: None if grad is None else grad.detach().to_dense().clone()
        for name, grad in named.items()
    }


class Watches:
    """Records gradients before and after reduction, and the state at the run's start and end."""

    def __init__(self):
        self.before, self.after = [], []

    @hookimpl
    def on_run_start(self, run):
        self.lr = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
        self.state = [
            [{k: v.clone() for k, v in one.items()} for one in optimizer.state.values()]
            for optimizer in run.optimizers
        ]
        state = {**run.module.state_dict(), **dict(run.module.named_buffers())}
        self.started = {name: value.clone() for name, value in state.items()}

    @hookimpl(wrapper=True)
    def reduce_gradients(self, run):
        self.before.append(gradients(run))
        yield
        self.after.append(gradients(run))

    @hookimpl
    def on_exception(self, run, error):
        Path(sys.argv[1], f"error-{run.world.rank}").write_text(f"{type(error).__name__}: {error}")

    @hookimpl
    def on_run_end(self, run):
        self.pickled = [len(pickle.dumps(optimizer)) for optimizer in run.optimizers]
        self.ended = {name: value.clone() for name, value in run.module.state_dict().items()}


class Sends:
    """Records the order of Horovod's operations, by name, and of the first layer's backward."""

    FUNCTIONS = (
        "allreduce_async_",
        "grouped_allreduce_async_",
        "allgather_async",
        "broadcast_async_",
        "sparse_allreduce_async",
    )

    def __init__(self):
        self.seen = []
        #: Factors of each gradient's all-reduce, before and after the sum.
        self.scales = []

    def __enter__(self):
        self.own = {name: getattr(hvd, name) for name in self.FUNCTIONS}
        for function, own in self.own.items():

            def noted(*arguments, function=function, own=own, **options):
                self.seen.append((function, options.get("name")))
                if ".gradient." in (options.get("name") or ""):
                    self.scales.append(
                        (options.get("prescale_factor"), options.get("postscale_factor"))
                    )
                return own(*arguments, **options)

            setattr(hvd, function, noted)
        return self

    def __exit__(self, *_):
        for function, own in self.own.items():
            setattr(hvd, function, own)


def train(make=Net, precision="32-true", accumulate=1, **options):
    module, watch, sends = make(), Watches(), Sends()
    if make is Net:
        module.first.weight.register_hook(
            lambda grad: sends.seen.append(("backward", "first.weight"))
        )
    trainer = gt.Trainer(
        strategy="horovod",
        strategy_options={"scale_lr": False, **options},
        accelerator="cpu",
        devices=RANKS,
        max_epochs=1,
        precision=precision,
        accumulate_grad_batches=accumulate,
        enable_progress_bar=False,
        plugins=[watch],
    )
    with sends:
        trainer.fit(module, DataLoader(samples(), BATCH))
    left = [name for name in os.environ if name.startswith("HOROVOD_")]
    left = [name for name in left if name != "HOROVOD_CYCLE_TIME"]  # set by conftest.py
    return {
        **vars(watch),
        "sent": sends.seen,
        "scales": sends.scales,
        "rank": trainer.global_rank,
        "left": left,
    }


def waits():
    """Return the processor time that a wait uses. Rank 1 is 1.5 seconds late."""

    class Late(gt.Module):
        def validation_step(self, batch, batch_idx):
            run = self._run
            run.hooks.barrier(run=run)
            if self.trainer.global_rank == 1:
                time.sleep(1.5)
            began, busy = time.monotonic(), time.thread_time()
            run.hooks.barrier(run=run)
            self.waited = time.monotonic() - began
            self.share = (time.thread_time() - busy) / self.waited

    module = Late()
    trainer = gt.Trainer(
        strategy="horovod", accelerator="cpu", devices=RANKS, enable_progress_bar=False
    )
    trainer.validate(module, DataLoader(torch.zeros(RANKS, 1), 1))
    return {"waited": module.waited, "share": module.share}


class Gathers(gt.Module):
    """Passes every dtype and shape through every collective."""

    def validation_step(self, batch, batch_idx):
        run, rank = self._run, self.trainer.global_rank
        given = {
            "bool": torch.tensor([True, False, rank == 1]),
            "bfloat16": torch.tensor([1.5, -2.25, rank], dtype=torch.bfloat16),
            "float16": torch.tensor([1.5, rank], dtype=torch.float16),
            "complex": torch.tensor([1 + 2j, rank * 1j]),
            "conjugate": torch.tensor([1 + 2j, rank * 1j]).conj(),
            "scalar": torch.tensor(float(rank), dtype=torch.float64),
            "int8": torch.tensor([-3, rank], dtype=torch.int8),
            "uneven": torch.arange(2 * rank).reshape(rank, 2),
            "uneven bool": torch.ones(rank + 1, 3, dtype=torch.bool),
            "empty": torch.zeros(0, 3),
            "columns": (torch.arange(6).reshape(2, 3) + rank).T,
            "channels last": (torch.arange(16.0) + rank)
            .reshape(1, 4, 2, 2)
            .contiguous(memory_format=torch.channels_last),
        }
        self.given = given
        self.gathered = {
            what: run.hooks.all_gather(run=run, tensor=tensor) for what, tensor in given.items()
        }
        self.nothing = run.hooks.log_sync(run=run, values=torch.zeros(0, dtype=torch.float64))
        self.values = run.hooks.log_sync(
            run=run, values=torch.tensor([rank + 0.1, 1e300], dtype=torch.float64)
        )
        self.errors = []
        for odd in (
            torch.zeros(2, 1 + rank),
            torch.zeros(2, dtype=torch.float32 if rank else torch.float64),
            torch.zeros([1] * (1 + rank)),
        ):
            try:
                run.hooks.all_gather(run=run, tensor=odd)
            except gt.TrainingError as error:
                self.errors.append(str(error))


def gather():
    module, sends = Gathers(), Sends()
    trainer = gt.Trainer(
        strategy="horovod", accelerator="cpu", devices=RANKS, enable_progress_bar=False
    )
    with sends:
        trainer.validate(module, DataLoader(torch.zeros(RANKS, 1), 1))
    names = ("given", "gathered", "nothing", "values", "errors")
    return {**{name: getattr(module, name) for name in names}, "sent": sends.seen}


def resume_in_a_set():
    """Return the warnings of a resumed run in which rank 1 had other weights than rank 0."""
    made = {
        "strategy": "horovod",
        "accelerator": "cpu",
        "devices": RANKS,
        "enable_progress_bar": False,
    }
    made |= {"strategy_options": {"process_set": [0, 2]}, "output": f"{sys.argv[1]}/set"}
    gt.Trainer(max_epochs=1, **made).fit(Net(), DataLoader(samples(), BATCH))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gt.Trainer(max_epochs=2, **made).fit(Net(), DataLoader(samples(), BATCH), ckpt_path="last")
    messages = [str(one.message) for one in caught]
    return {"warnings": [message for message in messages if "process_set" in message]}


#: Cases that run with hvd.DistributedOptimizer too, with the same results: module and options.
WITH_HOROVODS_OPTIMIZER = {
    "sum": (Net, {"op": "sum"}),
    "fp16": (Net, {"compression": "fp16"}),
    "predivided": (Net, {"gradient_predivide_factor": 4.0}),
    "process set": (Net, {"process_set": [0, 2]}),
    "one rank only": (OneRankOnly, {}),
    "groups": (OneRankOnly, {"groups": 3}),
}
CASES = {
    "average": train,
    "sum": lambda: train(op="sum"),
    "fp16": lambda: train(compression="fp16"),
    "predivided": lambda: train(gradient_predivide_factor=4.0),
    "groups": lambda: train(OneRankOnly, groups=3),
    "process set": lambda: train(process_set=[0, 2]),
    "scaled": lambda: train(scale_lr=True),
    "scaled in a process set": lambda: train(scale_lr=True, process_set=[0, 2]),
    "scaled sum": lambda: train(scale_lr=True, op="sum"),
    "one rank only": lambda: train(OneRankOnly),
    "bfloat16": lambda: train(precision="bf16-true"),
    "bfloat16 in groups": lambda: train(precision="bf16-true", groups=2),
    "float64": lambda: train(precision="64-true"),
    "channels last": lambda: train(Images),
    "complex": lambda: train(Complex),
    "complex fp16": lambda: train(Complex, compression="fp16"),
    "sparse": lambda: train(Words),
    "unfrozen": lambda: train(Unfreezes),
    "recomputed": lambda: train(Recomputes),
    "meddled": lambda: train(Meddles),
    "accumulated": lambda: train(accumulate=2),
    "passes given": lambda: train(accumulate=2, backward_passes_per_step=2),
    "distributed optimizer": lambda: train(distributed_optimizer=True),
    "distributed optimizer, accumulated": lambda: train(
        accumulate=2, distributed_optimizer=True, backward_passes_per_step=2
    ),
    **{
        f"distributed optimizer, {name}": lambda make=make, options=options: train(
            make, **{"distributed_optimizer": True, **options}
        )
        for name, (make, options) in WITH_HOROVODS_OPTIMIZER.items()
    },
    "buffers": lambda: train(Buffers),
    "apart": lambda: train(Apart),
    "fresh": lambda: train(Fresh),
    "distributed optimizer, apart": lambda: train(Apart, distributed_optimizer=True),
    "resumed in a set": resume_in_a_set,
    "gathered": gather,
    "waiting": waits,
}
#: Cases that end with an error.
REFUSED = {
    "unfrozen": lambda: train(Unfreezes, distributed_optimizer=True),
    "recomputed": lambda: train(Recomputes, distributed_optimizer=True),
    "sparse": lambda: train(Words, distributed_optimizer=True),
    "closure": lambda: train(Closes, process_set=[0, 2]),
    "left": lambda: train(Leaves, distributed_optimizer=True),
}

if __name__ == "__main__":
    # Each run collects garbage at its end: 1 ms instead of 200 without the imported modules.
    gc.freeze()
    kept = {}
    for name in sys.argv[2:]:
        REFUSED[name]()
    for name, case in CASES.items():
        print("case", name, flush=True)
        kept[name] = case()
        torch.save(kept, f"{sys.argv[1]}/kept-{kept['average']['rank']}.pt")
