"""A TensorDataset whose batches are read at once: as torch reads them, and only if nobody sees."""

import contextlib

import numpy as np
import pytest
import torch
from small_models import Net, assert_equal, fit
from torch.utils import data

from geartrain.data.rows import with_rows_at_once
from geartrain.options import takes_shortcuts


def tensors(n=23):
    random = torch.Generator().manual_seed(1)
    return (
        torch.randn(n, 3, 2, generator=random),
        torch.arange(n),
        torch.randn(n, generator=random) > 0,
        torch.randn(n, 1, dtype=torch.complex64, generator=random),
    )


WHOLE = data.TensorDataset(*tensors())
PART = data.Subset(WHOLE, [5, 3, -1, 20, 7, 3, 11])
DATASETS = {
    "whole": WHOLE,
    "one tensor": data.TensorDataset(torch.arange(9.0)),
    "part": PART,
    "part of a part": data.Subset(PART, range(1, 6)),
    "random split": data.random_split(WHOLE, [0.5, 0.5])[0],
    "indices in a tensor": data.Subset(WHOLE, torch.tensor([4, 2, 8])),
    "indices of NumPy": data.Subset(WHOLE, np.array([4, 2, 8])),
    "small indices of NumPy": data.Subset(WHOLE, np.array([4, 2, 8], dtype=np.uint8)),
}
LOADERS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "drop_last": {"drop_last": True},
    "a generator": {"shuffle": True, "generator": torch.Generator()},
    "a worker": {"shuffle": True, "num_workers": 1},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def batches(loader):
    torch.manual_seed(3)
    if loader.generator is not None:
        loader.generator.manual_seed(4)
    return [batch for _ in range(2) for batch in loader]


def same(a, b):
    """True if batches are equal in type, bits and strides."""
    return [type(x) for x in a] == [type(x) for x in b] and all(
        torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride()
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one, other, strict=True)
    )


def reads_at_once(loader):
    return with_rows_at_once(loader) is not loader


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_batches_are_those_of_torch(options):
    loader = data.DataLoader(WHOLE, 4, **options)
    expected, found = batches(loader), batches(with_rows_at_once(loader))
    assert reads_at_once(loader)
    assert same(found, expected)


def dtypes():
    """Return the types of which torch makes tensors by a conversion."""
    found = []
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            torch.ones(1).to(dtype)
            found.append(dtype)
    return sorted(found, key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_tensors_of_every_type(dtype):
    tensor = torch.arange(10.0).to(dtype)
    loader = data.DataLoader(data.TensorDataset(tensor), 4)
    found = batches(with_rows_at_once(loader))
    assert len(found) == 6
    for (a,), (b,) in zip(found, batches(loader), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
def test_parts_of_a_dataset_too(dataset):
    loader = data.DataLoader(dataset, 3)
    found = with_rows_at_once(loader)
    assert found is not loader
    assert same(batches(found), batches(loader))
    assert isinstance(found.dataset, type(dataset))
    assert type(found.dataset).__name__ == type(dataset).__name__


@pytest.mark.parametrize("name", [n for n in data.__all__ if n.endswith("Sampler")])
def test_samplers_give_the_order(name):
    cls = getattr(data, name)
    arguments = {
        "BatchSampler": (data.SequentialSampler(WHOLE), 5, False),
        "SubsetRandomSampler": (range(9),),
        "WeightedRandomSampler": ([1.0] * len(WHOLE), 12),
        "DistributedSampler": (WHOLE, 2, 1),
        "Sampler": None,
    }.get(name, (WHOLE,))
    if arguments is None:
        return
    batch = name == "BatchSampler"
    options = {"batch_sampler" if batch else "sampler": cls(*arguments)}
    loader = data.DataLoader(WHOLE, **options, **({} if batch else {"batch_size": 4}))
    assert same(batches(with_rows_at_once(loader)), batches(loader))


#: Samplers may give more than numbers: each sample is then a part of the tensors.
SAMPLES = {
    "pairs": [(1, 0), (2, 1)],
    "lists": [[1, 2], [3, 4]],
    "tensors": [torch.tensor(1), torch.tensor(2)],
    "tensors of one": [torch.tensor([1]), torch.tensor([2])],
    "truths": [True, True],
    "slices": [slice(0, 2), slice(2, 4)],
    "of NumPy": [np.int64(3), np.uint8(1)],
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("indices", SAMPLES.values(), ids=SAMPLES)
def test_indices_that_are_no_numbers_mean_what_they_mean_to_torch(indices):
    dataset = data.TensorDataset(torch.arange(12.0).reshape(6, 2))
    loader = data.DataLoader(dataset, 2, sampler=indices)
    found = with_rows_at_once(loader)
    assert found is not loader
    assert same(batches(found), batches(loader))


def test_the_collation_of_the_loader_still_collates_samples():
    loader = data.DataLoader(WHOLE, 4)
    found = with_rows_at_once(loader)
    samples = [found.dataset[index] for index in range(4)]
    assert same([found.collate_fn(samples)], [loader.collate_fn(samples)])


class Noisy(data.TensorDataset):
    def __getitem__(self, index):
        return tuple(x + 1 for x in super().__getitem__(index))


class Own(data.DataLoader):
    def __iter__(self):
        return iter([])


def transposed():
    return torch.randn(4, 9).t()


@pytest.mark.parametrize(
    "loader",
    [
        data.DataLoader(Noisy(torch.arange(9.0)), 3),
        data.DataLoader(data.Subset(Noisy(torch.arange(9.0)), range(4)), 3),
        data.DataLoader(data.ConcatDataset([WHOLE]), 3),
        data.DataLoader(WHOLE, 3, collate_fn=lambda batch: batch),
        data.DataLoader(WHOLE, batch_size=None),
        data.DataLoader(data.TensorDataset(transposed()), 3),
        data.DataLoader(data.TensorDataset(torch.nn.Parameter(torch.ones(9))), 3),
        Own(WHOLE, 3),
        [1, 2],
    ],
)
def test_what_reads_or_collates_in_another_way_is_left_alone(loader):
    assert not reads_at_once(loader)


@pytest.mark.parametrize("kind", [torch.Tensor, tuple])
def test_a_collation_that_the_user_registers_is_used(monkeypatch, kind):
    functions = data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(functions, kind, lambda batch, collate_fn_map=None: batch)
    assert not reads_at_once(data.DataLoader(WHOLE, 3))


@pytest.mark.parametrize("kept", [True, False])
def test_tensors_that_the_user_replaces_are_read(kept):
    dataset = data.TensorDataset(torch.arange(9.0))
    loader = with_rows_at_once(data.DataLoader(data.Subset(dataset, range(6)), 3))
    dataset.tensors = (torch.arange(9.0) + 1,) if kept else (torch.arange(18.0)[::2],)
    found = torch.cat([batch for (batch,) in loader])
    assert found.tolist() == [float(n + 1 if kept else 2 * n) for n in range(6)]


def test_a_fit_uses_it_with_the_same_result(monkeypatch):
    expected, found = Net(), Net()
    found.load_state_dict(expected.state_dict())
    monkeypatch.setenv("GEARTRAIN_PLAIN", "1")
    takes_shortcuts.cache_clear()
    fit(expected, seed=1)
    monkeypatch.delenv("GEARTRAIN_PLAIN")
    takes_shortcuts.cache_clear()
    monkeypatch.delattr(data.TensorDataset, "__getitem__")
    fit(found, seed=1)
    assert_equal(expected, found)
