"""``async_checkpoint``: files are written while training continues.

A value of the module holds the writer: its pickle waits for a :class:`Gate`.
"""

import os
import shutil
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from small_models import DEADLINE, Net, loader, trainer
from torch import nn
from waiting import press_ctrl_c

from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import EMA, AsyncCheckpoint, ModelCheckpoint
from geartrain.testing import run_plugin
from geartrain_callbacks.async_checkpoint import _Writer


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert "geartrain async_checkpoint" not in names


class Gate:
    """A value of a checkpoint: its writer waits here until ``open`` is called."""

    def __init__(self, error=None):
        self.reached, self._opened, self.error = threading.Event(), threading.Event(), error

    def open(self):
        self._opened.set()

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        self.reached.set()
        assert self._opened.wait(DEADLINE)
        if self.error is not None:
            raise self.error
        return OrderedDict, ()


@pytest.fixture(autouse=True)
def _gates_may_be_written(monkeypatch):
    """A file has the value that ``__reduce__`` returns, but a checkpoint has no such objects."""
    monkeypatch.setattr("geartrain.checkpoint.files.not_plain", lambda value: None)


class Gated(Net):
    """Its checkpoint of each step in ``gates`` has a gate."""

    def __init__(self, gates):
        super().__init__(torch.optim.Adam)
        self.gates = gates

    def on_save_checkpoint(self, checkpoint):
        gate = self.gates.get(self.trainer.global_step)
        if gate is not None:
            checkpoint["gate"] = gate


class AtStep:
    """Calls a function after a step, once."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    @hookimpl
    def on_step_end(self, run):
        if run.step == self.step:
            self.action()


class Listener:
    """Records each file for which ``on_checkpoint_saved`` is called, and the step in it."""

    def __init__(self):
        self.saved = []

    @hookimpl
    def on_checkpoint_saved(self, run, path):
        self.saved.append((path.name, load(path)["step"], run.step, run.world.rank))


def load(path):
    return torch.load(path, weights_only=True)


def names():
    return sorted(path.name for path in Path("run/checkpoints").iterdir())


def every(steps, **options):
    return ModelCheckpoint(every_n_train_steps=steps, filename="{step}", **options)


def fit(module, *plugins, epochs=1, **options):
    """Train six steps an epoch."""
    done = trainer(output="run", max_epochs=epochs, plugins=plugins, **options)
    done.fit(module, loader())
    return done


def newest(count):
    """Keep the files of the newest steps."""
    return every(2, monitor="step", mode="max", save_top_k=count)


# --- what is written ------------------------------------------------------------------------------


class Tied(Gated):
    def __init__(self):
        super().__init__({})
        self.first = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.layers(self.tied(self.first(x)))


def assert_equal(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert type(a) is type(b)
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for pair in zip(a, b, strict=True):
            assert_equal(*pair)
    else:
        assert a == b


def test_the_file_is_the_one_of_a_run_without_the_plugin():
    files = {}
    for plugins in ([], [AsyncCheckpoint()]):
        torch.manual_seed(1)
        fit(Tied(), *plugins, epochs=2, seed=1)
        files[len(plugins)] = load("run/last.ckpt")
        size = Path("run/last.ckpt").stat().st_size
        files[len(plugins)].pop("plan")
        shutil.move("run", f"run{len(plugins)}")
    assert_equal(files[1], files[0])
    model = files[1]["model"]
    assert model["first.weight"].data_ptr() == model["tied.weight"].data_ptr()
    assert abs(size - Path("run0/last.ckpt").stat().st_size) < 2000


def test_training_continues_while_the_file_of_an_earlier_step_is_written():
    gate, seen = Gate(), []

    def look():
        assert gate.reached.wait(DEADLINE)
        seen.extend(names())
        gate.open()

    module = Gated({2: gate})
    fit(module, AsyncCheckpoint(), every(2), AtStep(3, look))
    assert seen == [f".step=2.ckpt.{os.getpid()}"]
    assert names() == ["step=6.ckpt"]


def test_the_file_has_the_weights_of_its_step():
    gate, weights = Gate(), []
    module = Gated({2: gate})
    keep = AtStep(
        2, lambda: weights.append({n: p.detach().clone() for n, p in module.named_parameters()})
    )
    fit(module, keep, AsyncCheckpoint(), newest(3), AtStep(3, gate.open))
    state = load("run/checkpoints/step=2.ckpt")
    assert_equal(dict(state["model"]), weights[0])
    steps = [
        slot["step"].item() for slot in state["fit"]["optimizers"][0]["state"]["state"].values()
    ]
    assert steps == [2.0] * 4


def test_a_run_resumes_from_its_file_as_without_the_plugin():
    whole, stopped = Net(torch.optim.Adam), Net(torch.optim.Adam)
    stopped.load_state_dict(whole.state_dict())
    trainer(output="whole", max_epochs=3, seed=1).fit(whole, loader())
    trainer(output="run", max_epochs=2, seed=1, plugins=[AsyncCheckpoint()]).fit(stopped, loader())
    rest = Net(torch.optim.Adam)
    trainer(output="run", max_epochs=3, seed=1).fit(rest, loader(), ckpt_path="last")
    assert_equal(dict(rest.state_dict()), dict(whole.state_dict()))


def test_averaged_weights_are_written():
    fit(Net(), EMA(), AsyncCheckpoint())
    state = load("run/last.ckpt")
    assert state["trained"].keys() == state["model"].keys()
    assert "saved_by" not in state


# --- which files are complete ---------------------------------------------------------------------


def test_plugins_are_told_of_complete_files_only_and_of_each_once():
    listener = Listener()
    fit(Gated({}), listener, AsyncCheckpoint(), newest(-1))
    assert listener.saved == [
        ("step=2.ckpt", 2, 4, 0),
        ("step=4.ckpt", 4, 6, 0),
        ("step=6.ckpt", 6, 6, 0),
        ("last.ckpt", 6, 6, 0),
    ]


def test_a_file_is_deleted_after_its_replacement_is_complete():
    gate, seen = Gate(), []

    def look():
        assert gate.reached.wait(DEADLINE)
        seen.append(Path("run/checkpoints/step=2.ckpt").exists())
        gate.open()

    fit(Gated({4: gate}), AsyncCheckpoint(), newest(1), AtStep(5, look))
    assert seen == [True]
    assert names() == ["step=6.ckpt"]


def test_two_plugins_with_the_same_names_keep_both_files():
    gate = Gate()
    first, second = every(2, dirpath="run/checkpoints"), every(2, dirpath="run/checkpoints")
    fit(Gated({2: gate}), AsyncCheckpoint(), first, second, AtStep(1, gate.open))
    assert names() == ["step=6-v1.ckpt", "step=6.ckpt"]


def test_a_link_to_a_file_that_is_not_complete_is_a_file():
    gate, seen = Gate(), []

    def look():
        seen.append(Path("run/checkpoints/last.ckpt").is_symlink())
        gate.open()

    fit(
        Gated({}),
        AsyncCheckpoint(),
        every(2, save_last="link"),
        AtStep(3, look),
    )
    assert seen == [False]
    assert load("run/checkpoints/last.ckpt")["step"] == 6


def test_an_interrupted_write_is_not_resumed():
    """The copy of the folder is what a kill would leave."""
    gate = Gate()

    def copy():
        assert gate.reached.wait(DEADLINE)
        shutil.copytree("run", "killed")
        gate.open()

    fit(Gated({9: gate}), AsyncCheckpoint(), every(3), AtStep(10, copy), epochs=2)
    hidden = [path.name for path in Path("killed").rglob(".*.ckpt.*")]
    assert len(hidden) == 1
    module, start = Gated({}), []
    first = AtStep(7, lambda: start.append(7))
    trainer(output="killed", max_epochs=2, plugins=[first, every(3)]).fit(
        module, loader(), ckpt_path="auto"
    )
    assert start == [7]
    assert not list(Path("killed").rglob(".*.ckpt.*"))


def test_two_fits_with_one_trainer():
    listener, module = Listener(), Gated({})
    run = trainer(output="run", plugins=[listener, AsyncCheckpoint()])
    run.fit(module, loader())
    run.fit(module, loader())
    assert [name for name, *_ in listener.saved] == ["last.ckpt", "last.ckpt"]


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_of_the_writer_ends_the_run_at_the_next_save():
    gate, steps = Gate(OSError(28, "No space left on device")), []
    count = AtStep(3, lambda: steps.append(3))
    gate.open()
    with pytest.raises(TrainingError, match=r"step=2\.ckpt could not be written"):
        fit(
            Gated({2: gate}),
            count,
            AsyncCheckpoint(),
            newest(1),
            AtStep(4, lambda: steps.append(4)),
        )
    assert steps == [3, 4]
    assert names() == []


def test_an_error_of_the_writer_ends_a_run_that_saves_no_more():
    gate = Gate(ValueError("no"))
    gate.open()
    expected = r"last\.ckpt could not be written: ValueError: no"
    with pytest.raises(TrainingError, match=expected) as caught:
        fit(Gated({6: gate}), AsyncCheckpoint())
    assert "could not be written" not in "".join(caught.value.__notes__)  # not a second time
    assert not Path("run/last.ckpt").exists()


@pytest.mark.parametrize(
    "error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
def test_the_file_is_complete_when_a_fit_that_fails_returns(error):
    gate = Gate()

    def fail():
        assert gate.reached.wait(DEADLINE)
        threading.Timer(0.1, gate.open).start()
        raise error

    with pytest.raises(type(error)):
        fit(Gated({2: gate}), AsyncCheckpoint(), every(2), AtStep(3, fail))
    assert load("run/checkpoints/step=2.ckpt")["step"] == 2
    assert names() == ["step=2.ckpt"]


def test_ctrl_c_while_a_save_waits_for_the_file_before_it():
    gate = Gate()

    def press():
        saves = AsyncCheckpoint.save_checkpoint, _Writer.wait
        press_ctrl_c(saves, then=(AsyncCheckpoint._on_exception, _Writer.wait))
        gate.open()

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        fit(Gated({2: gate}), AsyncCheckpoint(), every(2))
    assert names() == ["step=2.ckpt"]


@pytest.mark.parametrize("first", ["kept", "async"])
def test_the_checkpoint_of_an_error_is_written_at_once(first):
    def fail():
        raise RuntimeError("mine")

    kept = every(2, save_on_exception=True)
    plugins = [kept, AsyncCheckpoint()]
    with pytest.raises(RuntimeError, match="mine"):
        fit(Gated({}), *(plugins if first == "kept" else plugins[::-1]), AtStep(3, fail))
    assert load("run/checkpoints/exception.ckpt")["step"] == 3
    assert load("run/checkpoints/step=2.ckpt")["step"] == 2


def test_an_error_of_the_writer_is_a_note_of_the_error_that_came_first():
    gate = Gate(ValueError("no"))
    gate.open()

    def fail():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        fit(Gated({2: gate}), AsyncCheckpoint(), every(2), AtStep(3, fail))
    assert "step=2.ckpt could not be written: ValueError: no" in caught.value.__notes__[-1]


class OwnFormat:
    """A strategy's way to write checkpoints, in a plugin."""

    replaces = frozenset({"save_checkpoint"})

    @hookimpl
    def save_checkpoint(self, state, path):
        torch.save(state, path)


def test_another_writer_is_refused_before_training():
    with pytest.raises(UsageError, match="both mean to own the hook 'save_checkpoint'"):
        fit(Net(), AsyncCheckpoint(), OwnFormat())


# --- elsewhere ------------------------------------------------------------------------------------


def test_on_two_ranks_each_is_told_of_the_complete_file():
    results = run_plugin([Listener(), AsyncCheckpoint()], output="run", max_epochs=2)
    for rank, result in enumerate(results):
        assert [(name, who) for name, _, _, who in result.plugin.saved] == [("last.ckpt", rank)] * 2


def test_with_loader_workers():
    listener = Listener()
    run = trainer(output="run", max_epochs=2, plugins=[listener, AsyncCheckpoint()])
    run.fit(Net(), loader(num_workers=1))
    assert len(listener.saved) == 2


def test_a_checkpoint_after_the_fit_is_written_at_once():
    run = fit(Net(), AsyncCheckpoint())
    run.save_checkpoint("after.ckpt")
    assert load("after.ckpt")["step"] == 6


def test_the_plugin_is_found_by_its_name():
    listener = Listener()
    run = trainer(output="run", max_epochs=2, plugins=["async_checkpoint", listener])
    run.fit(Net(), loader())
    assert [(step, told) for _, step, told, _ in listener.saved] == [(6, 12), (12, 12)]
