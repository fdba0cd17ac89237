"""Batches on their way to the device, and where loaders come from."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain.data import DataSource, count_batches, first_size, loader_batch_size, map_tensors, move

from .models import EvalNet, Net, Stream, fit, loader, samples, trainer

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


# --- moving --------------------------------------------------------------------------------------------------------------


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
    assert {tensor.device for tensor in tensors_in(batch)} == {torch.device("cpu")}  # the loader's own batch is as it was
    assert len(tensors_in(moved)) == len(tensors_in(batch))


@pytest.mark.parametrize("name", nestings())
def test_map_tensors_keeps_the_form(name):
    batch = nestings()[name]
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert same_form(batch, doubled)
    assert all(torch.equal(b, a * 2) for a, b in zip(tensors_in(batch), tensors_in(doubled), strict=True))


def test_a_defaultdict_keeps_its_factory():
    moved = move(nestings()["defaultdict"], META)
    assert moved["new"] == []


class Output(OrderedDict):
    """As a model of transformers gives it: a mapping that takes one item at a time."""

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


@pytest.mark.parametrize("thing", ["text", b"bytes", 3, None, {1, 2}, Item, range(3)])
def test_what_has_no_tensor_stays_itself(thing):
    assert move(thing, META) is thing
    assert map_tensors(thing, torch.neg) is thing


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(5, 2), 5),
        (torch.ones(()), None),
        ({"temperature": torch.ones(()), "x": torch.ones(4, 2)}, 4),
        ([torch.ones(4, 2), torch.ones(9)], 4),
        ({"text": ["a", "b"], "x": torch.ones(3)}, 3),
        (("text", Pair(None, torch.ones(2))), 2),
        (Item([torch.ones(6)]), 6),
        ([], None),
        ("text", None),
        (None, None),
        ({"a": 3, "b": ["text", b"bytes"]}, None),
    ],
)
def test_first_size(batch, size):
    assert first_size(batch) == size


# --- how many batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "with_length", "without"), [(None, 6, None), (0, 0, 0), (4, 4, 4), (9, 6, 9), (1.0, 6, None), (0.0, 0, 0)]
)
def test_count_batches(limit, with_length, without):
    assert count_batches(loader(), limit, "train") == with_length
    assert count_batches(Stream(loader()), limit, "train") == without


@pytest.mark.parametrize(
    ("data", "limit", "error", "words"),
    [
        ([], None, TrainingError, "train is empty: list"),
        (loader(3, 4, drop_last=True), 5, TrainingError, r"train is empty: DataLoader of TensorDataset.*drop_last"),
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


# --- where loaders come from ---------------------------------------------------------------------------------------------

METHODS = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


def having(base, name):
    """An object of ``base`` whose loaders each say ``name`` and the stage."""
    methods = {method: lambda self, stage=stage: Stream([f"{name} {stage}"]) for stage, method in METHODS.items()}
    return type("Having", (base,), methods)()


@pytest.mark.parametrize("stage", METHODS)
def test_precedence(stage):
    module, datamodule, given = having(gt.Module, "module"), having(gt.DataModule, "datamodule"), Stream(["given"])

    def first(source, module=module):
        (one,) = source.loaders(stage, module)
        return next(iter(one))

    assert first(DataSource({stage: given}, datamodule)) == "given"
    assert first(DataSource({stage: None}, datamodule)) == f"datamodule {stage}"
    assert first(DataSource({}, gt.DataModule())) == f"module {stage}"  # a DataModule that does not have this one
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
    one.fit(net, loader(20), datamodule=Data())
    assert one.num_training_batches == 5


@pytest.mark.parametrize(
    ("given", "loaders"),
    [
        (lambda: [loader(4), loader(8)], 2),
        (lambda: (loader(4), loader(8)), 2),
        (lambda: [loader(4)], 1),
        (lambda: [Stream([1]), loader(8)], 2),
        (lambda: list(loader(8)), 1),
        (lambda: [torch.ones(4, 3), torch.ones(4, 3)], 1),
        (lambda: [{"x": torch.ones(4, 3)}], 1),
        (lambda: [torch.ones(4, 3).numpy()], 1),
        (lambda: ["text", "more"], 1),
        (lambda: loader(4), 1),
        (lambda: Stream(loader(4)), 1),
    ],
    ids=["list", "tuple", "list of one", "streams", "batches", "tensors", "dicts", "arrays", "texts", "loader", "stream"],
)
def test_a_list_of_loaders_and_a_list_of_batches(given, loaders):
    data = given()
    found = DataSource({"validate": data}).loaders("validate", gt.Module())
    assert len(found) == loaders
    assert (found == [data]) == (data is found[0])
    assert DataSource({"train": list(loader(8))}).loaders("train", gt.Module()) != []


@pytest.mark.parametrize("stage", METHODS)
def test_what_cannot_be_iterated_is_refused(stage):
    with pytest.raises(UsageError, match=f"loader to {stage} is 3"):
        DataSource({stage: 3}).loaders(stage, gt.Module())


def test_a_list_of_batches_trains_as_its_loader_does():
    assert fit(train=list(loader()), max_epochs=2).global_step == 12


# --- the module's own transfer -------------------------------------------------------------------------------------------


class Transfers(EvalNet):
    """Batches that no ``.to`` moves: texts, which become tensors on their way."""

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


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_each_batch_is_transferred_once_in_evaluation(command):
    net = Transfers()
    getattr(trainer(), command)(net, [Stream(["1", "2"]), Stream(["3"])])
    assert net.calls == [*once(1), *once(2), *once(3, idx=1)]


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
def test_one_transfer_hook_alone(hook):
    class One(Net):
        calls = 0

    def double(self, batch, dataloader_idx):
        self.calls += 1
        return [batch[0] * 2, batch[1]]

    class Batches:
        got = ()

        @hookimpl(wrapper=True)
        def step(self, micro_batches):
            self.got = (*self.got, *micro_batches)
            return (yield)

    setattr(One, hook, double)
    net, batches = One(), Batches()
    fit(net, plugins=[batches])
    assert net.calls == 6
    assert all(torch.equal(got[0], x * 2) for got, (x, _) in zip(batches.got, loader(), strict=True))


def test_numpy_arrays_are_sized_by_their_shape():
    numpy = pytest.importorskip("numpy", reason="the size of NumPy batches needs NumPy")
    assert first_size({"x": numpy.zeros((5, 2))}) == 5
    assert first_size(numpy.float32(1)) is None
    assert first_size((numpy.float32(1), numpy.zeros(3))) == 3


def test_training_takes_one_loader():
    one = trainer()
    one.fit(Net(), [loader(8)])
    assert one.global_step == 2
    with pytest.raises(UsageError, match=r"2 loaders.*training takes one"):
        one.fit(Net(), [loader(8), loader(8)])


@pytest.mark.parametrize(("command", "option"), [("fit", "limit_train_batches"), ("test", "limit_test_batches")])
def test_a_limit_of_zero_leaves_nothing_to_do(command, option):
    with pytest.raises(UsageError, match=f"{option}=0"):
        getattr(trainer(**{option: 0}), command)(EvalNet(), loader())
