"""Small modules, data and plugins that the tests of core and of the tools share."""

import copy
import threading
from collections import Counter
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain import hookimpl
from geartrain.parallel import SeveralRanks

SGD = partial(torch.optim.SGD, lr=0.1)
DEADLINE = 30


def trainer(**options):
    """Return a Trainer; by default one epoch on the CPU without progress bar and sanity check."""
    return gt.Trainer(
        **{
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            **options,
        }
    )


def fit(module=None, train=None, val=None, **options):
    """Train a module, by default a new ``Net`` on 6 batches, and return the trainer."""
    one = trainer(**options)
    one.fit(Net() if module is None else module, loader() if train is None else train, val)
    return one


def samples(n=24, dtype=torch.float32):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=random, dtype=dtype)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def loader(n=24, batch_size=4, dtype=torch.float32, **options):
    return DataLoader(samples(n, dtype), batch_size=batch_size, **options)


class Stream:
    """Batches without a length, like those of an iterable dataset."""

    def __init__(self, batches):
        self.batches = list(batches)

    def __iter__(self):
        return iter(self.batches)


class Net(gt.Module):
    """A regression on three numbers; ``optimizer(parameters)`` creates its optimizer."""

    def __init__(self, optimizer=SGD, dtype=torch.float32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 4, dtype=dtype), nn.Tanh(), nn.Linear(4, 1, dtype=dtype)
        )
        self.make_optimizer = optimizer

    def forward(self, x):
        return self.layers(x)

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class EvalNet(Net):
    """A ``Net`` with evaluation steps, whose calls it records in ``seen``.

    Each entry is ``(stage, batch_idx, dataloader_idx)``.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append((self.trainer.run.stage, batch_idx, dataloader_idx))
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append(("test", batch_idx, dataloader_idx))
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])


class Logging(Net):
    """A ``Net`` whose steps call ``train`` or ``validate(module, batch, batch_idx)`` to log."""

    def __init__(self, train=None, validate=None):
        super().__init__()
        self.in_train, self.in_validate = train, validate

    def training_step(self, batch, batch_idx):
        if self.in_train is not None:
            self.in_train(self, batch, batch_idx)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        if self.in_validate is not None:
            self.in_validate(self, batch, batch_idx)


class Loggers:
    """A logger that keeps ``(step, metrics)`` of each call."""

    def __init__(self):
        self.lines = []

    @hookimpl
    def log_metrics(self, metrics, step):
        self.lines.append((step, dict(metrics)))


class Recorder:
    """Wraps every hook of a step and records the order of the calls."""

    def __init__(self):
        self.calls = []

    def note(self, *what):
        self.calls.append(" ".join(map(str, what)))

    @hookimpl(wrapper=True)
    def step(self, micro_batches):
        self.note("step", len(micro_batches))
        yield
        self.note("step done")

    @hookimpl(wrapper=True)
    def micro_step(self, first, last):
        inner = yield
        self.note(
            "micro_step", *(word for word, is_so in (("first", first), ("last", last)) if is_so)
        )
        return inner

    @hookimpl(wrapper=True)
    def forward(self, method, args):
        self.note("forward", method, args[1])
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self, loss):
        assert loss.ndim == 0
        self.note("backward")
        return (yield)

    @hookimpl(wrapper=True)
    def reduce_gradients(self):
        self.note("reduce_gradients")
        return (yield)

    @hookimpl(wrapper=True)
    def clip_gradients(self):
        self.note("clip_gradients")
        return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(self, run, optimizer, closure):
        assert closure is None
        self.note("optimizer_step", run.optimizers.index(optimizer))
        return (yield)

    @hookimpl
    def on_step_end(self, run):
        self.note("on_step_end", run.step)


class Noting(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler that records its steps."""

    def __init__(self, optimizer, note):
        self.note = lambda what: None
        super().__init__(optimizer, lambda step: 1.0)
        self.note = note

    def step(self, *arguments):
        self.note("scheduler")
        super().step(*arguments)


class Own(EvalNet):
    """Records the order of the module's hooks."""

    def __init__(self, note, **options):
        super().__init__(**options)
        self.note = note
        for name in dir(Net):
            if name.startswith("on_") and not name.endswith(("checkpoint", "transfer")):
                setattr(self, name, partial(self._own, name))

    def _own(self, name, *arguments):
        self.note(name)

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.note("validation_step")


class Pretend:
    """A strategy of one process that claims to be rank 0 of two; both ranks log the same values."""

    planned = gt.Layout(2, 1)
    world = gt.World(rank=0, size=2, local_rank=0, local_size=2, node_rank=0)

    @hookimpl
    def plan_processes(self):
        return self.planned

    @hookimpl
    def launch(self, worker):
        return worker(0)

    @hookimpl
    def setup_process_group(self):
        return self.world

    @hookimpl
    def make_coordinator(self):
        return SeveralRanks()

    @hookimpl
    def log_sync(self, values):
        return values.expand(2, -1)

    @hookimpl
    def all_gather(self, tensor):
        return tensor.expand(2, *tensor.shape)

    @hookimpl
    def broadcast(self, obj):
        return {} if obj is None else obj  # rank 0 has no buffers

    @hookimpl
    def barrier(self): ...

    @hookimpl
    def wrap_model(self, model):
        return model

    @hookimpl
    def shard_dataloader(self, loader):
        return loader

    @hookimpl
    def teardown_process_group(self): ...


class CountsInPlace:
    """Wraps in place, as fully_shard does: the same object, with a forward hook."""

    def __init__(self):
        self.calls = Counter()

    @hookimpl(wrapper=True)
    def wrap_model(self):
        model = yield
        model.register_forward_hook(lambda _, args, output: self.calls.update([args[0]]))
        return model


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_equal(a, b):
    """Assert that weights are bitwise equal."""
    a, b = (x if isinstance(x, dict) else x.state_dict() for x in (a, b))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def differ(a, b):
    a, b = (x if isinstance(x, dict) else x.state_dict() for x in (a, b))
    return any(not torch.equal(a[name], b[name]) for name in a)


def by_hand(module, batches, optimizer=SGD, epochs=1, before_step=None):
    """Train a copy of the module in plain PyTorch and return it."""
    module = copy.deepcopy(module)
    stepper = optimizer(module.parameters())
    for _ in range(epochs):
        for batch in batches:
            stepper.zero_grad()
            module.loss(batch).backward()
            if before_step is not None:
                before_step(module)
            stepper.step()
    return module


def together(functions):
    """Call each function in a separate thread; return their results or exceptions."""
    results = [None] * len(functions)

    def call(i):
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "a rank hangs"
    return results
