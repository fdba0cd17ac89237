"""A loader that resumes itself goes on where it was, and no batch is skipped twice."""

from types import SimpleNamespace

import pytest
import torch
from small_models import trainer
from torch.utils.data import DataLoader, Sampler

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
    files = sorted((tmp_path / "whole" / "steps").iterdir())[::3]
    go(tmp_path / "two", data(make), **options)  # its last.ckpt is of an epoch's end
    for file in (*files, tmp_path / "two" / "last.ckpt"):
        fit = torch.load(file, weights_only=True)["fit"]
        done = fit["batches_seen"] + fit["batch_idx"]
        rest = go(tmp_path / "rest" / file.stem, data(make), file, **options, max_epochs=3)
        assert rest.seen == whole[done:]
        assert rest.read == len(rest.seen)  # none is read again


@pytest.mark.parametrize("limit", [10, 4])
def test_a_position_that_a_sampler_applies_when_it_is_read_is_of_one_epoch(tmp_path, limit):
    options = {"limit_train_batches": limit}
    whole = go(tmp_path / "whole", Data(Sampled), **options).seen
    for step in (2, limit - 1, limit, limit + 1):
        file = tmp_path / "whole" / "steps" / f"step={step}.ckpt"
        rest = go(tmp_path / f"rest-{step}", Data(Sampled), file, **options).seen
        assert rest == whole[step:]
