"""After a run in other processes, the caller has the same state as after a run in its process."""

import itertools
import os
import pickle
import time
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
import geartrain_parallel.launching as launching
from geartrain.callbacks import AsyncCheckpoint, ModelCheckpoint
from geartrain_spawn import starter

from .models import Net, loader, trainer

ALL = [
    "fork",
    *(pytest.param(method, marks=pytest.mark.matrix) for method in ("spawn", "forkserver")),
]


@pytest.fixture(scope="module", params=ALL)
def fitted(request):
    """A trainer and its module after two fits, and a record of the first."""
    one = trainer(request.param)  # seeds the weights
    module = Net()
    one.fit(module, loader(), loader(20))
    seen = {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "losses": list(module.losses),
        "metrics": dict(one.run.metrics),
        "counters": (
            one.global_step,
            one.current_epoch,
            one.world_size,
            one.global_rank,
            one.num_training_batches,
        ),
    }
    one.fit(module, loader(), loader(20))
    return module, one, seen


def test_weights_and_buffers(fitted):
    module, _, seen = fitted
    torch.manual_seed(3)
    fresh = Net()
    assert not torch.equal(seen["weights"]["net.0.weight"], fresh.net[0].weight)
    assert seen["weights"]["net.1.num_batches_tracked"] == 12
    assert module.net[1].num_batches_tracked == 24
    assert seen["losses"][-1] < seen["losses"][0]
    assert all(
        parameter.grad_fn is None and parameter.requires_grad for parameter in module.parameters()
    )


def test_metrics_and_counters(fitted):
    _, one, seen = fitted
    assert set(seen["metrics"]) == {"loss", "val_loss"}
    assert seen["counters"] == (12, 2, 2, 0, 6)
    assert one.callback_metrics["val_loss"] != seen["metrics"]["val_loss"]
    assert one.logged_metrics == one.callback_metrics


def test_a_second_fit_continues_from_the_weights_of_the_first(fitted):
    module, _, seen = fitted
    assert len(module.losses) == 24
    assert module.losses[:12] == seen["losses"]
    assert module.best["loss"] == min(module.losses)
    assert torch.is_tensor(module.best["weights"][0])


def test_optimizer_and_schedule(fitted):
    module, one, _ = fitted
    (optimizer,), (schedule,) = one.run.optimizers, one.run.schedulers
    assert optimizer.param_groups[0]["params"][0] is module.net[0].weight
    assert optimizer.state[module.net[0].weight]["step"] == 12
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert schedule.scheduler.last_epoch == 2


def test_checkpoints_that_rank_0_writes_in_the_background(tmp_path):
    best = ModelCheckpoint()  # the newest
    one = trainer(output=tmp_path / "run", plugins=[best, AsyncCheckpoint()])
    one.fit(Net(), loader(), loader(20))
    assert torch.load(one.output / "last.ckpt", weights_only=True)["step"] == 12
    assert [str(path) for path in (one.output / "checkpoints").iterdir()] == [best.best_model_path]
    assert torch.load(best.best_model_path, weights_only=True)["step"] == 12


def test_a_checkpoint_saved_by_the_caller_resumes_the_fit(fitted, tmp_path):
    module, one, _ = fitted
    one.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "a.ckpt")
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True)
    )
    rest = gt.Trainer(accelerator="cpu", max_epochs=3, enable_progress_bar=False)
    rest.fit(loaded, loader(), loader(20), ckpt_path=tmp_path / "a.ckpt")
    assert rest.current_epoch == 3
    assert rest.run.optimizers[0].state[loaded.net[0].weight]["step"] == 24  # 12 of one rank


def test_evaluation_after_fit(fitted):
    module, one, _ = fitted
    (validated,) = one.validate(module, loader(20))
    assert validated["val_loss"] == pytest.approx(one.callback_metrics["val_loss"].item())
    assert one.test(module, loader(21)) == [{"samples": 21.0}]
    assert one.global_step == 12

    class Predicted(NamedTuple):  # a local class: no other process can import it
        y: torch.Tensor

    class Predicts(Net):
        def predict_step(self, batch, batch_idx):
            return Predicted(self.net(batch[0]))

    same = Predicts()
    same.load_state_dict(module.state_dict())
    predicted = one.predict(same, loader(8))
    module.eval()
    expected = module.net(loader(8).dataset.tensors[0])
    # Predictions of both ranks, in the loader's order.
    assert torch.allclose(torch.cat([output.y for output in predicted]), expected, atol=1e-6)


def test_start_methods_train_alike(fitted, request):
    _, _, seen = fitted
    first = request.config.stash.setdefault(_LOSSES, seen["losses"])
    assert seen["losses"] == pytest.approx(first, rel=1e-6)


_LOSSES = pytest.StashKey[list]()


# --- modules, plugins, data -----------------------------------------------------------------------


class Grows(Net):
    """Creates a layer, a parameter and a buffer only in the process that trains."""

    def setup(self, stage):
        if stage == "fit":
            self.head = nn.Linear(1, 1)
            self.scale = nn.Parameter(torch.ones(1))
            self.net[1].register_buffer("seen", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.net[1].seen += 1
        return (self.head(self.net(batch[0])) * self.scale - batch[1]).square().mean()

    def on_train_end(self):
        pass


def test_layers_made_in_setup_come_back():
    module = Grows()
    trainer().fit(module, loader())
    assert isinstance(module.head, nn.Linear)
    assert module.scale.item() != 1.0
    assert module.net[1].seen.item() == 12
    assert set(module.state_dict()) >= {"head.weight", "scale", "net.1.seen"}
    assert len(list(module.parameters())) == 9


class Lazy(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.LazyLinear(1)

    def setup(self, stage):
        self.net(torch.zeros(1, 4))

    def on_train_end(self):
        pass


def test_lazy_layers_come_back_initialized():
    module = Lazy()
    trainer(max_epochs=1).fit(module, loader())
    assert module.net.weight.shape == (1, 4)


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        self.net[1].weight = self.net[0].weight


def test_tied_weights_stay_tied():
    module = Tied()
    before = module.net[0].weight.detach().clone()
    trainer(max_epochs=1).fit(module, loader())
    assert module.net[1].weight is module.net[0].weight
    assert not torch.equal(before, module.net[0].weight)


class Counts:
    """A plugin without state_dict: its plain attributes come back."""

    def __init__(self):
        self.steps, self.console = 0, None

    @gt.hookimpl
    def on_step_end(self, run):
        self.steps += 1
        self.console = open(os.devnull)  # noqa: SIM115 (cannot be pickled, and need not be)


class Remembers:
    def __init__(self):
        self._seen = []

    @gt.hookimpl
    def on_step_end(self, run):
        self._seen.append(run.step)

    def state_dict(self):
        return {"seen": self._seen}

    def load_state_dict(self, state):
        self._seen = [*state["seen"], "loaded"]


def test_a_later_run_continues_the_table_of_the_first(tmp_path):
    one = trainer(plugins=["csv"], output=tmp_path, max_epochs=1)
    module = Net()
    one.fit(module, loader())
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    one.test(module, loader(21))
    assert (tmp_path / "metrics.csv").read_text().splitlines()[-1].endswith(",21.0")
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == len(lines) + 1


class Data(gt.DataModule):
    def __init__(self):
        self.setups = 0

    def setup(self, stage):
        self.setups += 1

    def train_dataloader(self):
        assert self.trainer.world_size == 2
        return loader()


def test_plugins_and_datamodule():
    counts, remembers, data = Counts(), Remembers(), Data()
    one = trainer(plugins=[counts, remembers], max_epochs=1)
    one.fit(Net(), datamodule=data)
    assert counts.steps == 6
    assert counts.console is None
    assert remembers._seen == [1, 2, 3, 4, 5, 6, "loaded"]
    assert data.setups == 1
    assert data.trainer is one


HOOKS = """
import geartrain as gt

class Mine:
    def __init__(self, every: int = 1):
        self.every, self.calls = every, 0

    @gt.hookimpl
    def on_step_end(self, run):
        self.calls += run.step % self.every == 0
        run.module.seen_by_a_file = self.every

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
"""


def test_a_plugin_from_a_file_is_created_in_each_rank_with_its_options_and_state(
    tmp_path, monkeypatch
):
    (tmp_path / "spawned_hooks.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    one = trainer(
        "forkserver",
        plugins=["spawned_hooks.py"],
        plugin_options={"spawned_hooks": {"every": 2}},
        max_epochs=1,
    )
    module = Net()
    one.fit(module, loader())
    one.fit(module, loader())
    assert module.seen_by_a_file == 2
    plugin = next(part.plugin for part in one.setup.parts if part.info.name == "spawned_hooks")
    assert plugin.calls == 6


def test_an_optimizer_that_cannot_be_created_twice_is_a_warning_and_weights_come_back():
    class Once(Net):
        def configure_optimizers(self):
            if self.global_step:  # in the caller, after the run
                raise RuntimeError("only in a rank")
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Once()
    before = module.net[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="only in a rank"):
        trainer(max_epochs=1).fit(module, loader())
    assert not torch.equal(before, module.net[0].weight)


# --- size -----------------------------------------------------------------------------------------


class Big(gt.Module):
    """A module with frozen weights and 300 metrics."""

    def __init__(self, mebibytes):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(mebibytes, 256, 1024), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        for i in range(300):
            self.log(f"metric {i}", float(i), sync_dist=True)
        return (self.scale - 1).square().sum()

    def on_train_end(self):
        self.table.fill_(7.0)

    def configure_optimizers(self):
        return torch.optim.SGD([self.scale], lr=0.1)


@pytest.fixture
def _nothing_is_left(tmp_path, monkeypatch):
    util.get_temp_dir()  # multiprocessing keeps this folder until this process ends
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    yield
    assert list(tmp_path.iterdir()) == []
    if shared.is_dir():
        assert {
            path
            for path in shared.iterdir()
            if path not in before and path.name.startswith(("torch", "geartrain", "sem"))
        } == set()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mebibytes", [64, pytest.param(1024, marks=pytest.mark.end_to_end)])
@pytest.mark.usefixtures("_nothing_is_left")
def test_many_weights_and_300_metrics_come_back_and_leave_nothing(mebibytes):
    module, one = Big(mebibytes), trainer(max_epochs=1)
    one.fit(module, DataLoader(torch.zeros(4, 1)))
    assert module.table.min() == module.table.max() == 7.0
    assert module.scale.item() > 0
    assert [one.callback_metrics[f"metric {i}"] for i in range(300)] == list(range(300))


@pytest.mark.usefixtures("_nothing_is_left")
def test_loader_workers_leave_nothing():
    module = Net()
    trainer(max_epochs=1).fit(module, loader(num_workers=1), loader(20, num_workers=1))
    assert len(module.losses) == 6


# --- settings that a rank copies ------------------------------------------------------------------


class Looks(Net):
    def setup(self, stage):
        self.dtype_there = torch.zeros(1).dtype is torch.float64
        self.drawn = torch.rand(1, dtype=torch.float32).item()
        self.variable = os.environ.get("OF_THE_CALLER")
        self.directory = os.getcwd()


@pytest.mark.parametrize(
    "method",
    ["spawn", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("fork", "forkserver"))],
)
def test_ranks_copy_dtype_random_state_environment_and_directory(method, monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_CALLER", method)  # the forkserver has another environment
    monkeypatch.chdir(tmp_path)
    module = Looks()
    one = trainer(method, max_epochs=1, seed=None)
    torch.manual_seed(11)
    expected = torch.rand(1, dtype=torch.float32).item()
    torch.manual_seed(11)
    torch.set_default_dtype(torch.float64)
    try:
        one.validate(
            module.double(),
            DataLoader(TensorDataset(torch.zeros(4, 4), torch.zeros(4, 1)), batch_size=2),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert module.dtype_there
    assert module.variable == method
    assert module.directory == str(tmp_path)
    assert module.drawn == expected


def test_a_trainer_can_be_pickled():
    same = pickle.loads(
        pickle.dumps(gt.Trainer(accelerator="cpu", devices=1, strategy="single", max_epochs=3))
    )
    assert same.max_epochs == 3
    assert same.plan.strategy.name == "single"


def test_weights_come_back_in_the_type_of_the_precision():
    module = Net()
    before = module.net[0].weight.detach().bfloat16()
    trainer(precision="bf16-true", max_epochs=1).fit(module, loader())
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert not torch.equal(module.net[0].weight, before)


def test_the_best_checkpoint_is_known_to_the_caller(tmp_path):
    best = ModelCheckpoint(
        "val_loss", save_top_k=2, save_last=True, dirpath=tmp_path, filename="{epoch}"
    )
    one, module = trainer(plugins=[best]), Net()
    one.fit(module, loader(), loader(20))
    files = {str(tmp_path / f"epoch={epoch}.ckpt") for epoch in range(2)}
    assert set(best.best_k_models) == files
    assert best.best_model_path == min(best.best_k_models, key=best.best_k_models.get)
    assert best.last_model_path == str(tmp_path / "last.ckpt")
    assert {str(path) for path in tmp_path.iterdir()} == {*files, best.last_model_path}
    one.test(dataloaders=loader(21), ckpt_path="best")
    saved = torch.load(best.best_model_path, weights_only=True)["model"]
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    first = {path: path.read_bytes() for path in tmp_path.iterdir()}
    one.fit(module, loader(), loader(20))  # starts from scratch, beside the files of the first fit
    assert len(best.best_k_models) == 2
    second = {*best.best_k_models, best.last_model_path}
    assert {str(path) for path in tmp_path.iterdir()} == {*map(str, first), *second}
    assert len(first) == len(second) == 3
    assert all(path.read_bytes() == data for path, data in first.items())


class LateOnRank0:
    """Delays rank 0, so that it reaches the store after rank 1."""

    def __getstate__(self):
        return {"is_late": True}

    def __setstate__(self, state):
        if os.environ.get("RANK") == "0":
            time.sleep(1)


def test_a_run_with_ddp_before_it_in_the_same_process(monkeypatch):
    """Both runs use the process's store, so a rank could read the keys of the other run."""
    number = 10_000
    monkeypatch.setattr(launching, "_runs", number)
    monkeypatch.setattr(starter, "_numbers", itertools.count(number + 1))
    gt.Trainer(
        accelerator="cpu", devices=1, strategy="ddp", max_epochs=1, enable_progress_bar=False
    ).fit(Net(), loader())
    assert launching._runs == number + 1
    module = Net()
    module.late = LateOnRank0()
    trainer("forkserver", max_epochs=1, strategy_options={"timeout": 15.0}).fit(module, loader())


class OfTwo(Net):
    def training_step(self, batch, batch_idx):
        rows = [torch.cat(parts) for parts in zip(batch["a"], batch["b"], strict=True)]
        return super().training_step(rows, batch_idx)


@pytest.mark.end_to_end
def test_several_training_loaders_are_sent_to_the_ranks():
    data = {"a": loader(16, num_workers=1, persistent_workers=True), "b": loader(48, shuffle=True)}
    for mode, batches in (("min_size", 2), ("max_size_cycle", 6)):
        one, module = trainer(max_epochs=2), OfTwo()
        one.fit(module, gt.CombinedLoader(data, mode))
        assert (one.global_step, one.num_training_batches) == (2 * batches, batches)
        assert len(module.losses) == 2 * batches
