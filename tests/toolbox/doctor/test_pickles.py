"""``geartrain doctor --pickle TARGET``."""

import json
import sys

import pytest

from geartrain_cli.arguments import read_arguments
from geartrain_tools.doctor.findings import examine

TARGET = """
import threading
import torch
from torch.utils.data import DataLoader, TensorDataset
import geartrain as gt

class Scale:
    def __init__(self):
        self.lock = threading.Lock()

class Samples(TensorDataset):
    pass

def by_name(batch):
    return torch.utils.data.default_collate(batch)

class Net(gt.Module):
    def __init__(self, locked: bool = False, activation: bool = False):
        super().__init__()
        print("the module is made")
        self.layer = torch.nn.Linear(1, 1)
        if locked:
            self.transform = Scale()
            self.layer.stream = (i for i in range(3))
        if activation:
            self.activation = lambda x: x

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(gt.DataModule):
    def __init__(
        self, workers: int = 0, method: str = "", broken: bool = False, locked: bool = False
    ):
        self.options = (workers, method, broken)
        if locked:
            self.lock = threading.Lock()

    def prepare_data(self):
        print("prepared")

    def setup(self, stage):
        print("set up for", stage)
        self.made_in_setup = threading.Lock()  # after it was pickled
        self.samples = Samples(torch.ones(4, 1))

    def teardown(self, stage):
        print("torn down after", stage)

    def train_dataloader(self):
        workers, method, broken = self.options
        functions = {"collate_fn": by_name}
        if broken:
            self.samples.lock = self.made_in_setup
            functions = {"collate_fn": lambda batch: batch, "worker_init_fn": lambda worker: None}
        context = method if workers and method else None
        return DataLoader(
            self.samples, num_workers=workers, multiprocessing_context=context, **functions
        )
"""


@pytest.fixture(autouse=True)
def target(write):
    write("target.py", TARGET)


@pytest.fixture
def pickles(capsys):
    """``pickles("--model.locked=true")``: return the section."""

    def run(*options):
        from geartrain_tools.doctor import pickles as doctor_pickles

        return examine(
            "pickle", doctor_pickles.pickles, read_arguments("fit", ["target.py", *options], None)
        )

    return run


@pytest.fixture(params=["cloudpickle", "pickle"])
def pickler(request):
    """Run with geartrain-spawn, which uses cloudpickle, and without it."""
    if request.param == "cloudpickle":
        request.getfixturevalue("spawn")
    return request.param


@pytest.fixture
def spawn(installed):
    pytest.importorskip("geartrain_spawn", reason="geartrain-spawn is not installed here")
    installed.update(("geartrain-ddp", "geartrain-spawn"))


def paths(section):
    return [row["path"] for row in section.facts["refused"]]


def found(section, must):
    return [(finding.what, finding.fix) for finding in section.findings if finding.must is must]


def test_all_of_it_pickles(pickles, pickler):
    section = pickles()
    assert section.error is None
    assert section.facts == {"target": "Net", "pickler": pickler, "refused": []}
    assert section.findings == []


def test_each_attribute_is_named_with_its_type(pickles, pickler):
    section = pickles("--model.locked=true", "--data.locked=true")
    assert paths(section) == ["model.layer.stream", "model.transform.lock", "data.lock"]
    assert [row["what"] for row in section.facts["refused"]] == [
        "generator",
        "_thread.lock",
        "_thread.lock",
    ]
    assert all(
        "ddp_spawn" in row["needed_by"] and row["needed"] for row in section.facts["refused"]
    )
    problems = found(section, True)
    assert problems[1][0].startswith(
        "model.transform.lock: _thread.lock cannot be pickled (cannot pickle '_thread.lock' object"
    )
    assert "setup()" in problems[1][1]
    assert found(section, False) == []


def test_a_lambda_travels_with_geartrain_spawn_alone(pickles, pickler):
    section = pickles("--model.activation=true")
    assert found(section, True) == []
    if pickler == "cloudpickle":
        assert section.facts["refused"] == []
    else:
        ((what, fix),) = found(section, False)
        assert what.startswith("model.activation: <lambda> at target.py:")
        assert "pip install geartrain-spawn" in fix


LOADED = """
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("loaded_from_elsewhere", "plug/ins.py")
sys.modules["loaded_from_elsewhere"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

class Net(Net):
    def __init__(self):
        super().__init__()
        self.activation = module.scaled
"""


def test_globals_of_a_function_that_is_sent_by_value_must_pickle(
    spawn, pickles, write, monkeypatch
):
    """geartrain-spawn sends a function that a new process could not import with its globals."""
    monkeypatch.setitem(sys.modules, "loaded_from_elsewhere", None)
    write(
        "plug/ins.py",
        "import threading\nLOCK = threading.Lock()\n"
        "def scaled(x):\n    with LOCK:\n        return x\n",
    )
    write("target.py", TARGET + LOADED)
    section = pickles()
    assert paths(section) == ["model.activation (its global 'LOCK')"]
    assert len(found(section, True)) == 1


def test_a_blocked_geartrain_spawn_counts_as_missing(spawn, pickles, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_BLOCK", "ddp_spawn")
    assert pickles().facts["pickler"] == "pickle"


@pytest.mark.usefixtures("known_all_reduce")
def test_without_geartrain_spawn_the_message_names_it(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "geartrain_spawn.refusals", None)
    monkeypatch.delitem(sys.modules, "geartrain_tools.doctor.pickles", raising=False)
    done = command("doctor --pickle target.py")
    assert done.code == 1
    assert (
        "geartrain doctor --pickle needs geartrain-spawn. Fix: pip install geartrain-spawn"
        in done.out
    )


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (["--data.workers=0"], False),
        (["--data.workers=2", "--data.method=fork"], False),
        (["--data.workers=2", "--data.method=spawn"], True),
    ],
)
def test_loaders_count_if_their_workers_are_not_forked(pickles, pickler, options, needed):
    section = pickles("--data.broken=true", *options)
    assert section.error is None
    expected = [
        "train_dataloader.dataset.lock",
        "train_dataloader.collate_fn",
        "train_dataloader.worker_init_fn",
    ]
    assert paths(section) == expected
    assert {row["needed"] for row in section.facts["refused"]} == {needed}
    assert len(found(section, needed)) == 3
    assert found(section, not needed) == []
    how = (
        f"workers start by {options[-1].rpartition('=')[2]}"
        if len(options) > 1
        else "num_workers=0"
    )
    assert all(how in what for what, _ in found(section, needed))


def test_data_is_prepared_set_up_and_torn_down(pickles, capsys):
    pickles()
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["the module is made", "prepared", "set up for fit", "torn down after fit"]


ATTACHED = """
class Data(Data):
    def prepare_data(self):
        print("data on", self.trainer.world_size)

    def teardown(self, stage):
        print("data off", self.trainer.world_size)

class Net(Net):
    def setup(self, stage):
        print("net on", self.trainer.world_size, type(self.trainer.datamodule).__name__)
        if self.fails:
            raise OSError("no disk")

    def val_dataloader(self):
        print("val loader of rank", self.trainer.global_rank)
        return DataLoader([1.0], collate_fn=lambda rows: rows)

    def teardown(self, stage):
        print("net off", self.trainer.world_size)

    fails = {fails}
"""


@pytest.mark.parametrize("fails", [False, True])
def test_module_and_data_have_their_trainer_as_in_fit_and_not_afterwards(
    write, monkeypatch, capsys, fails
):
    write("attached.py", TARGET + ATTACHED.format(fails=fails))
    from geartrain_tools.doctor import pickles as doctor_pickles

    request = read_arguments("fit", ["attached.py"], None)
    model, data = request.make_model()
    monkeypatch.setattr(type(request), "make_model", lambda self: (model, data))
    capsys.readouterr()
    section = examine("pickle", doctor_pickles.pickles, request)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "data on 1"
    assert "net on 1 Data" in printed
    assert printed[-2:] == ["data off 1", "net off 1"]
    assert ("val loader of rank 0" in printed) is not fails
    assert section.error == ("OSError: no disk" if fails else None)
    assert paths(section) == ([] if fails else ["val_dataloader.collate_fn"])
    assert (model._trainer, data.trainer) == (None, None)


def test_a_target_that_cannot_be_made_is_a_failed_check(pickles, write):
    write("target.py", TARGET.replace('print("prepared")', 'raise OSError("no network")'))
    section = pickles("--model.locked=true")
    assert section.error == "OSError: no network"
    assert "model.transform.lock" in paths(section)  # earlier findings are kept


@pytest.mark.usefixtures("known_all_reduce")
def test_a_problem_of_a_device_does_not_hide_objects_that_do_not_pickle(
    command, install, monkeypatch
):
    source = (
        "class A:\n    priority = 9\n    unavailable = staticmethod(lambda: None)\n"
        "    device_count = staticmethod(lambda: 0)\n"
    )
    install("geartrain-empty", source, accelerators={"empty": "A"})
    done = command("doctor --json --pickle target.py --model.locked=true")
    assert done.code == 1
    facts = json.loads(done.out)
    assert len(facts["pickle"]["refused"]) == 2
    assert {problem["check"] for problem in facts["problems"]} >= {"pickle"}
    shown = command("doctor --pickle target.py --model.locked true").out
    assert (
        "model.transform.lock: _thread.lock cannot be pickled" in shown.partition("what to fix")[2]
    )
