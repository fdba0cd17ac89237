"""The transfer of batches to the device, their sizes, and the source of loaders."""

import multiprocessing
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from small_models import EvalNet, Net, Stream, fit, loader, samples, trainer
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain.data.loaders import (
    BatchSizer,
    count_batches,
    first_size,
    loader_batch_size,
)
from geartrain.data.sources import DataSource
from geartrain.module.nested import map_tensors, move
from geartrain.testing import run_plugin

Pair = namedtuple("Pair", "x y")
META = torch.device("meta")


@dataclass
class Item:
    x: object
    label: str = "label"


@dataclass(frozen=True)
class Frozen:
    x: object
    n: int = field(default=3, init=False)


class Movable:
    """Any object with ``to``."""

    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device):
        return Movable(str(device))


def tensors_in(data):
    found = []
    map_tensors(data, found.append)
    return found


def nestings():
    x = torch.ones(2, 3)
    default = defaultdict(list, a=x)
    return {
        "tensor": x,
        "list": [x, "text", 3, None],
        "tuple": (x, (x, [x])),
        "dict": {"a": x, "b": {"c": [x]}, "text": "t"},
        "named tuple": Pair(x, [x]),
        "dataclass": Item([x]),
        "frozen dataclass": Frozen({"x": x}),
        "OrderedDict": OrderedDict(b=x, a=[x]),
        "defaultdict": default,
        "mapping": MappingProxyType({"a": x}),
        "all together": [Pair(Item({"a": (x,)}), OrderedDict(z=x)), "text"],
    }


# --- moving ---------------------------------------------------------------------------------------


def same_form(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape
    if isinstance(a, MappingProxyType):
        return list(a) == list(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_form(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_form, a, b))
    if isinstance(a, Item | Frozen):
        return all(same_form(vars(a)[name], vars(b)[name]) for name in vars(a))
    return a == b


@pytest.mark.parametrize("name", nestings())
def test_move_keeps_the_form_and_moves_every_tensor(name):
    batch = nestings()[name]
    moved = move(batch, META)
    assert same_form(batch, moved)
    assert {tensor.device for tensor in tensors_in(moved)} == {META}
    # The loader's own batch is as it was.
    assert {tensor.device for tensor in tensors_in(batch)} == {torch.device("cpu")}
    assert len(tensors_in(moved)) == len(tensors_in(batch))


def test_a_defaultdict_keeps_its_factory():
    moved = move(nestings()["defaultdict"], META)
    assert moved["new"] == []


class Output(OrderedDict):
    """An output as in transformers: a mapping that takes one item at a time."""

    def update(self, *_, **__):
        raise TypeError("no update")


def test_an_output_of_transformers_is_mapped():
    output = Output()
    output["loss"] = torch.ones(())
    output["logits"] = (torch.ones(2), None)
    moved = move(output, META)
    assert type(moved) is Output
    assert moved["loss"].device == moved["logits"][0].device == META
    assert output["loss"].device.type == "cpu"


def test_objects_that_can_be_moved_are():
    moved = move([Movable(), {"a": Movable()}], META)
    assert [moved[0].device, moved[1]["a"].device] == ["meta", "meta"]
    packed = move(pack_sequence([torch.ones(3), torch.ones(2)]), torch.device("cpu"))
    assert packed.data.shape == (5,)


@pytest.mark.parametrize("thing", ["text", None, {1, 2}, Item, range(3)])
def test_an_object_without_tensors_is_not_changed(thing):
    assert move(thing, META) is thing
    assert map_tensors(thing, torch.neg) is thing


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(()), None),
        ({"temperature": torch.ones(()), "x": torch.ones(4, 2)}, 4),
        ([torch.ones(4, 2), torch.ones(9)], 4),
        ({"text": ["a", "b"], "x": torch.ones(3)}, 3),
        (("text", Pair(None, torch.ones(2))), 2),
        (Item([torch.ones(6)]), 6),
        ([], None),
        ({"a": 3, "b": ["text", b"bytes"]}, None),
    ],
)
def test_first_size(batch, size):
    assert first_size(batch) == size


# --- how many samples -----------------------------------------------------------------------------


class Graphs:
    """A batch as in torch-geometric: it iterates over attributes, the first with a row a node."""

    def __init__(self, nodes, told=None):
        self.x = torch.zeros(nodes, 2)
        if told is not None:
            self.num_graphs = told

    def __iter__(self):
        return iter([("x", self.x)])


def image(_=None):
    return torch.zeros(3, 8, 8)


def sizes(data, collate_fn=None, batch_size=4):
    """Return the size of each batch, and the warnings."""
    data = (
        torch.utils.data.DataLoader(data, batch_size=batch_size, collate_fn=collate_fn)
        if isinstance(data, range)
        else data
    )
    sizer = BatchSizer(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return [sizer.size(batch) for batch in data], len(caught)


def test_a_run_may_resume_with_the_last_batch_of_an_epoch():
    batch = [torch.zeros(3, 9), torch.zeros(3)]
    assert BatchSizer(DataLoader(range(11), batch_size=4)).size(batch) == 3


@pytest.mark.parametrize(
    ("collate", "expected", "warned"),
    [
        # Time first, then labels.
        (lambda n: (torch.zeros(9, len(n)), torch.zeros(len(n))), [4, 4, 3], 0),
        (lambda n: ([image() for _ in n], torch.tensor(n)), [4, 4, 3], 0),
        (lambda n: [(image(), i) for i in n], [4, 4, 3], 0),
        (lambda n: {"images": [image() for _ in n]}, [4, 4, 3], 0),
        (lambda n: [f"text {i}" for i in n], [4, 4, 3], 0),
        (lambda n: (torch.zeros(7), Graphs(5 * len(n), told=len(n))), [4, 4, 3], 0),
        (lambda n: (Graphs(5 * len(n)), torch.zeros(len(n))), [4, 4, 3], 0),
        (lambda n: Graphs(5 * len(n)), [4, 4, 4], 1),
    ],
)
def test_size_of_a_batch(collate, expected, warned):
    assert sizes(range(11), collate) == (expected, warned)


def test_size_of_a_batch_of_a_dataset_smaller_than_a_batch():
    assert sizes(range(3), lambda n: [image() for _ in n], batch_size=8) == ([3], 0)


def test_size_of_a_batch_that_the_dataset_makes_itself():
    assert sizes(range(2), lambda n: torch.zeros(16, 2), batch_size=1) == ([16, 16], 0)


def test_size_of_a_batch_of_a_loader_without_a_batch_size():
    assert sizes(Stream([torch.zeros(5, 2), torch.zeros(2, 2)])) == ([5, 2], 0)
    assert sizes(Stream([(torch.zeros(5, 2), torch.zeros(5))])) == ([5], 0)
    assert sizes(Stream([Graphs(9, told=2)])) == ([2], 0)
    assert sizes(
        Stream([(torch.zeros(5, 2), torch.zeros(2)), (torch.zeros(7, 2), torch.zeros(2))])
    ) == ([5, 7], 1)


def test_size_of_a_short_stream():
    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.zeros(6, 2))

    assert sizes(torch.utils.data.DataLoader(Numbers(), batch_size=4)) == ([4, 2], 0)
    assert sizes(torch.utils.data.DataLoader(Numbers(), batch_size=9)) == ([6], 0)


def test_means_over_graphs_are_weighted_by_graphs():
    """Graphs 0 to 8 of 27 are classified right: 9/27, for any number of nodes."""

    class Right(EvalNet):
        def validation_step(self, batch, batch_idx):
            self.log("val_acc", torch.tensor([float(i < 9) for i in batch.numbers]).mean())

    def collate(numbers):
        batch = Graphs(sum(3 + i for i in numbers), told=len(numbers))
        batch.numbers = numbers
        return batch

    graphs = torch.utils.data.DataLoader(range(27), batch_size=8, collate_fn=collate)
    (metrics,) = trainer().validate(Right(), graphs)
    assert metrics["val_acc"] == pytest.approx(9 / 27)


def test_ambiguous_size_is_one_warning():
    class Logs(EvalNet):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)
            self.log("val_acc", 1.0)

    with pytest.warns(
        UserWarning,
        match=r"batch of Stream does not say.*\[2, 5\].*Fix: self.log\(\.\.\., batch_size=NUMBER\)",
    ) as caught:
        trainer().validate(Logs(), Stream([(torch.zeros(5, 2), torch.zeros(2))] * 3))
    assert len(caught) == 1


# --- how many batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "with_length", "without"),
    [(None, 6, None), (4, 4, 4), (9, 6, 9), (1.0, 6, None), (0.0, 0, 0)],
)
def test_count_batches(limit, with_length, without):
    assert count_batches(loader(), limit, "train") == with_length
    assert count_batches(Stream(loader()), limit, "train") == without


@pytest.mark.parametrize(
    ("data", "limit", "error", "words"),
    [
        ([], None, TrainingError, "train loader is empty: list"),
        (
            loader(3, 4, drop_last=True),
            5,
            TrainingError,
            r"train loader is empty: DataLoader of TensorDataset.*drop_last",
        ),
        (Stream([]), 0.5, UsageError, r"fraction \(0.5\).*no length"),
        ([1, 2, 3], 0.3, UsageError, r"0.3 of the 3 batches"),
    ],
)
def test_count_batches_errors(data, limit, error, words):
    with pytest.raises(error, match=words):
        count_batches(data, limit, "train")


def test_loader_batch_size():
    assert loader_batch_size(loader(24, 4)) == 4
    sampler = torch.utils.data.BatchSampler(range(24), 6, drop_last=False)
    assert loader_batch_size(torch.utils.data.DataLoader(samples(), batch_sampler=sampler)) == 6
    assert loader_batch_size([1, 2]) is None
    assert loader_batch_size(None) is None


# --- the source of loaders ------------------------------------------------------------------------

METHODS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def having(base, name):
    """Return an object of ``base`` whose loaders hold ``name`` and the stage."""
    methods = {
        method: lambda self, stage=stage: Stream([f"{name} {stage}"])
        for stage, method in METHODS.items()
    }
    return type("Having", (base,), methods)()


@pytest.mark.parametrize("stage", METHODS)
def test_precedence(stage):
    module, datamodule, given = (
        having(gt.Module, "module"),
        having(gt.DataModule, "datamodule"),
        Stream(["given"]),
    )

    def first(source, module=module):
        (one,) = source.loaders(stage, module)
        return next(iter(one))

    assert first(DataSource({stage: given}, datamodule)) == "given"
    assert first(DataSource({stage: None}, datamodule)) == f"datamodule {stage}"
    assert (
        first(DataSource({}, gt.DataModule())) == f"module {stage}"
    )  # a DataModule that does not have this one
    assert first(DataSource({})) == f"module {stage}"
    assert DataSource({}).loaders(stage, gt.Module()) == []


def test_fit_uses_loaders_of_several_origins():
    class Own(EvalNet):
        def val_dataloader(self):
            return loader(8)

    class Data(gt.DataModule):
        def train_dataloader(self):
            return loader(12)

    net = Own()
    one = trainer()
    one.fit(net, datamodule=Data())
    assert one.num_training_batches == 3
    assert len(net.seen) == 2
    one.fit(net, Data())  # the first argument may be a DataModule
    assert one.num_training_batches == 3
    with pytest.raises(gt.UsageError, match=r"Data has train_dataloader\. Fix: give one"):
        one.fit(net, loader(20), datamodule=Data())


class Moves:
    """A batch that is iterable and can be moved, as in torch-geometric."""

    def __iter__(self):
        return iter([("x", torch.ones(2))])

    def to(self, device):
        return self


@pytest.mark.parametrize(
    ("given", "loaders"),
    [
        (lambda: (loader(4), loader(8)), 2),
        (lambda: [loader(4)], 1),
        (lambda: [Stream([1]), loader(8)], 2),
        (lambda: {"a": [loader(4), loader(8)], "b": Stream([1])}, 3),
        (lambda: [loader(4), [loader(8)]], 2),
        (lambda: [pack_sequence([torch.ones(2)]), pack_sequence([torch.ones(2)])], 1),
        (lambda: [Moves(), Moves()], 1),
        (lambda: list(loader(8)), 1),
        (lambda: [torch.ones(4, 3), torch.ones(4, 3)], 1),
        (lambda: [{"x": torch.ones(4, 3)}], 1),
        (lambda: [torch.ones(4, 3).numpy()], 1),
        (lambda: ["text", "more"], 1),
        (lambda: Stream(loader(4)), 1),
    ],
    ids=[
        *("tuple", "list of one", "streams", "nested dict", "nested list", "packed", "moving"),
        *("batches", "tensors", "dicts", "arrays", "texts", "stream"),
    ],
)
def test_a_list_of_loaders_and_a_list_of_batches(given, loaders):
    data = given()
    found = DataSource({"validate": data}).loaders("validate", gt.Module())
    assert len(found) == loaders
    assert (
        all(isinstance(one, torch.utils.data.DataLoader | Stream) for one in found)
        or found[0] is data
    )
    assert DataSource({"train": list(loader(8))}).loaders("train", gt.Module()) != []


def test_data_that_cannot_be_iterated_is_refused():
    with pytest.raises(UsageError, match="the test loader is 3"):
        DataSource({"test": 3}).loaders("test", gt.Module())


class Frame:
    """Iterates over the names of its columns, as a data frame of pandas."""

    itertuples = None

    def __iter__(self):
        return iter(["a", "b"])

    def __repr__(self):
        return "a b\n" * 60


@pytest.mark.parametrize("command", ["fit", "predict"])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("ab", "'ab', which is not a loader"),
        (Frame(), "a Frame, which is not a loader"),
        ({}, "dict to .* holds nothing in place of loaders"),
        ({"a": loader(), "b": "text"}, "holds str in place of loaders"),
        ([loader(), None], "list to .* holds NoneType in place of loaders"),
    ],
)
def test_data_without_loaders_is_refused_before_anything_starts(command, data, words):
    one = trainer(
        plugins=[
            type("Launches", (), {"launch": hookimpl(wrapper=True)(lambda self: (yield 1 / 0))})()
        ]
    )
    with pytest.raises(UsageError, match=f"{words}.*Fix:"):
        getattr(one, command)(EvalNet(), data)


def test_a_loader_whose_length_is_not_implemented_has_none():
    class Unknown(Stream):
        def __len__(self):
            raise NotImplementedError

    results = run_plugin(
        ranks=2, data=Unknown(loader()), val_data=Unknown(loader()), module=EvalNet()
    )
    assert [result.trainer.global_step for result in results] == [6, 6]


def test_a_dict_of_loaders_is_evaluated_as_their_list():
    net, loaders = EvalNet(), {"b": loader(8), "a": loader(12, 3)}
    metrics = trainer().test(net, loaders)
    assert metrics == trainer().test(net, list(loaders.values()))
    assert [list(one) for one in metrics] == [[f"test_loss/dataloader_idx_{i}"] for i in range(2)]


def test_a_dict_of_loaders_validates_in_fit():
    net = EvalNet()
    fit(net, val={"a": loader(4), "b": loader(8)})
    assert net.seen == [("validate", 0, 0), ("validate", 0, 1), ("validate", 1, 1)]


def test_a_val_dataloader_that_forgets_return_is_a_warning():
    class Forgets(EvalNet):
        def val_dataloader(self):
            loader()

    with pytest.warns(
        UserWarning, match="Forgets.val_dataloader returned None, so there is nothing to validate"
    ):
        fit(Forgets())


# --- the module's own transfer --------------------------------------------------------------------


class Transfers(EvalNet):
    """Batches without ``.to``: texts, which a transfer hook makes tensors of."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.calls.append(("before", batch, dataloader_idx))
        return int(batch)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.calls.append(("transfer", batch, dataloader_idx))
        assert device == torch.device("cpu") == self.device
        return torch.full((1, 3), batch, device=device)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls.append(("after", batch[0, 0].item(), dataloader_idx))
        return batch.float(), batch[:, :1].float()


def once(number, idx=0):
    return [("before", str(number), idx), ("transfer", number, idx), ("after", number, idx)]


def test_each_batch_is_transferred_once_in_training():
    net = Transfers()
    fit(net, ["1", "2", "3"], accumulate_grad_batches=2, max_epochs=2)
    assert net.calls == [call for number in (1, 2, 3, 1, 2, 3) for call in once(number)]


def test_each_batch_is_transferred_once_in_evaluation():
    net = Transfers()
    trainer().predict(net, [Stream(["1", "2"]), Stream(["3"])])
    assert net.calls == [*once(1), *once(2), *once(3, idx=1)]


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device"])
def test_a_transfer_hook_that_forgets_return_is_named(hook):
    net = type("Forgets", (Net,), {hook: lambda self, batch, *_: None})()
    with pytest.raises(
        TrainingError, match=f"Forgets: {hook} made None of a batch. Fix: return the batch"
    ):
        fit(net)


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
def test_one_transfer_hook_alone(hook):
    class Sees(Net):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    seen = []
    double = {hook: lambda self, batch, dataloader_idx: [batch[0] * 2, batch[1]]}
    fit(type("One", (Sees,), double)())
    assert all(torch.equal(found, x * 2) for found, (x, _) in zip(seen, loader(), strict=True))


def test_numpy_arrays_are_sized_by_their_shape():
    numpy = pytest.importorskip("numpy", reason="the size of NumPy batches needs NumPy")
    assert first_size({"x": numpy.zeros((5, 2))}) == 5
    assert first_size(numpy.float32(1)) is None
    assert first_size((numpy.float32(1), numpy.zeros(3))) == 3


@pytest.mark.parametrize(
    ("command", "option"), [("fit", "limit_train_batches"), ("test", "limit_test_batches")]
)
def test_a_limit_of_zero_leaves_nothing_to_do(command, option):
    with pytest.raises(UsageError, match=f"{option}=0"):
        getattr(trainer(**{option: 0}), command)(EvalNet(), loader())


class Fails(EvalNet):
    """Raises in the middle of an epoch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise KeyError("the user's own")
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("command", "module", "persistent"),
    [
        ("fit", EvalNet, True),
        ("fit", Fails, False),
        ("fit", Fails, True),
        ("validate", Fails, True),
    ],
)
def test_loader_workers_end_with_the_run_and_start_again_in_the_next(command, module, persistent):
    loader = DataLoader(samples(16), batch_size=2, num_workers=1, persistent_workers=persistent)
    for _ in range(2):
        # A traceback refers to the frames of the run.
        with pytest.raises(KeyError) if module is Fails else nullcontext() as error:
            getattr(trainer(), command)(module(), loader)
        assert multiprocessing.active_children() == [], error


def test_loader_workers_end_with_a_session():
    with gt.Session() as session:
        loader = session.setup_dataloaders(
            DataLoader(samples(8), batch_size=2, num_workers=1, persistent_workers=True)
        )
        assert len(list(loader)) == 4
    assert multiprocessing.active_children() == []
