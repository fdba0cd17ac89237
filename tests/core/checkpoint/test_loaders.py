"""Test resumes of loaders with a state: they continue, and no batch is skipped twice."""

from types import SimpleNamespace

import pytest
import torch
from small_models import trainer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

import geartrain as gt
from geartrain.callbacks import ModelCheckpoint


class Stream:
    """Goes on where ``state_dict`` was taken; counts the batches that were read."""

    size = 10

    def __init__(self, start=0):
        self.at, self.read = start, 0

    def __iter__(self):
        for i in range(self.at % self.size, self.size):
            self.at, self.read = i + 1, self.read + 1
            yield torch.full((1,), float(i))

    def __len__(self):
        return self.size

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Endless(Stream):
    """Has no length: an epoch ends at ``limit_train_batches``, and the next goes on."""

    size = 10**6
    __len__ = None


class Once(Endless):
    """Is its own iterator."""

    def __iter__(self):
        return self

    def __next__(self):
        self.at, self.read = self.at + 1, self.read + 1
        return torch.full((1,), float(self.at))


class Stateful(DataLoader):
    """A DataLoader that resumes itself, as torchdata's: each epoch begins at the first batch."""

    def __init__(self, start=0):
        super().__init__(torch.arange(10.0), batch_size=1)
        self.done, self.next, self.read = 0, start, 0

    def __iter__(self):
        first, self.next = self.next, 0
        return self.batches(first, super().__iter__())

    def batches(self, first, iterator):
        for i, batch in enumerate(iterator):
            if i >= first:
                self.done, self.read = i + 1, self.read + 1
                yield batch

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.next = state["done"]


class Lazy(Sampler):
    """Applies a position when it is first read, as torchdata's StatefulDistributedSampler."""

    def __init__(self):
        self.done, self.next = 0, None

    def __len__(self):
        return 10

    def __iter__(self):
        first, self.next = self.next or 0, None
        for i in range(first, 10):
            self.done = i + 1
            yield i

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.next = state["done"]


class Sampled(DataLoader):
    """A DataLoader whose position is its sampler's."""

    read = 0

    def __init__(self, start=0):
        super().__init__(torch.arange(10.0), batch_size=1, sampler=Lazy())

    def state_dict(self):
        return self.sampler.state_dict()

    def load_state_dict(self, state):
        self.sampler.load_state_dict(state)


class Data(gt.DataModule):
    """Makes a loader."""

    def __init__(self, make):
        self.make, self.start = make, 0

    def train_dataloader(self):
        self.loader = self.make(self.start)
        return self.loader


class Keeps(Data):
    """Also puts the loader where it was, by its own state."""

    def state_dict(self):
        return {"at": next(iter(self.loader.state_dict().values()))}

    def load_state_dict(self, state):
        self.start = state["at"]


class Seen(gt.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, float(batch)))
        return (self.weight * batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def go(folder, data, path=None, **options):
    module = Seen()
    every = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}
    keep = ModelCheckpoint(dirpath=folder / "steps", **every)
    options = {"seed": 1, "max_epochs": 2, "plugins": [keep], "output": folder, **options}
    trainer(**options).fit(module, datamodule=data, ckpt_path=path)
    return SimpleNamespace(seen=module.seen, read=data.loader.read)


CASES = {
    "length": (Stream, {}),
    "limit": (Stream, {"limit_train_batches": 4}),
    "endless": (Endless, {"limit_train_batches": 4}),
    "iterator": (Once, {"limit_train_batches": 4}),
    "DataLoader": (Stateful, {}),
    "DataLoader, limit": (Stateful, {"limit_train_batches": 4}),
    "accumulation": (Stream, {"accumulate_grad_batches": 3}),
}


@pytest.mark.parametrize("data", [Data, Keeps])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error:.*thrown away")
def test_a_loader_that_resumes_itself_gives_each_batch_once(tmp_path, case, data):
    make, options = CASES[case]
    whole = go(tmp_path / "whole", data(make), **options, max_epochs=3).seen
    files = sorted((tmp_path / "whole" / "steps").iterdir())
    files = files[:: max(3, len(files) // 5)]
    go(tmp_path / "two", data(make), **options)  # its last.ckpt is of an epoch's end
    for file in (*files, tmp_path / "two" / "last.ckpt"):
        fit = torch.load(file, weights_only=True)["fit"]
        done = fit["batches_seen"] + fit["batch_idx"]
        rest = go(tmp_path / "rest" / file.stem, data(make), file, **options, max_epochs=3)
        assert rest.seen == whole[done:]
        assert rest.read == len(rest.seen)  # none is read again


class Eager(Sampler):
    """Draws its order when it is asked for an iterator, and not when that is first read."""

    def __init__(self, generator=None):
        self.generator = generator

    def __len__(self):
        return 10

    def __iter__(self):
        return iter(torch.randperm(10, generator=self.generator).tolist())


class Eagerly(DataLoader):
    """Has a sampler and, for the seeds of workers, the same generator."""

    read = 0

    def __init__(self, start=0):
        generator = torch.Generator().manual_seed(3)
        batches = [Eager(generator), 1, False]
        super().__init__(
            torch.arange(10.0), batch_sampler=EagerBatches(*batches), generator=generator
        )


class EagerBatches(BatchSampler):
    """Asks its sampler for an iterator at once, as torchdata's."""

    def __iter__(self):
        order = iter(self.sampler)
        return ([index] for index in order)


def of_torchdata(name):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    data = torch.arange(10.0)
    options = {
        "shuffle": {"shuffle": True},
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        "of torch": {"sampler": RandomSampler(data)},
        "distributed": {"sampler": samplers.StatefulDistributedSampler(data, 1, 0)},
        "stream": {},
    }[name]
    loader = stateful.StatefulDataLoader(Numbers() if name == "stream" else data, 1, **options)
    loader.read = 0
    return loader


class Numbers(IterableDataset):
    """A stream that keeps its position."""

    at = 0

    def __iter__(self):
        for i in range(self.at, 10):
            self.at = i + 1
            yield float(i)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


OTHERS = {
    "a sampler with the position": Sampled,
    "an order that is drawn at once": Eagerly,
    **{
        f"torchdata: {name}": lambda _, name=name: of_torchdata(name)
        for name in ("shuffle", "generator", "of torch", "distributed", "stream")
    },
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("error:the checkpoint was saved", "ignore:'set_vital' is deprecated")
def test_a_dataloader_with_samplers_of_others_resumes_anywhere(tmp_path, name):
    whole = go(tmp_path / "whole", Data(OTHERS[name])).seen
    for step in (3, 10):  # within an epoch, and at its last batch
        file = tmp_path / "whole" / "steps" / f"step={step}.ckpt"
        rest = go(tmp_path / f"rest-{step}", Data(OTHERS[name]), file).seen
        assert rest == whole[step:]
