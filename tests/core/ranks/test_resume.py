"""Two ranks that resume: bit for bit as without a stop; and in a world of another size."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from regression import Curve, Net, one_trainer, samples, weights
from threads import equal, on_threads
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain.callbacks import ModelCheckpoint


class Own(Net):
    """Dropout, BatchNorm, Adam and a schedule by steps."""

    def __init__(self):
        super().__init__("adam", norm=True)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x, extra=True):
        return self.drop(super().forward(x, extra))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Keeps:
    """Its state differs between ranks."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def on_step_end(self, run):
        self.seen.append(100 * run.world.rank + run.step)

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


def loader(**options):
    return DataLoader(samples(44), batch_size=4, **options)


def go(folder, epochs, path=None, plugins=(), **options):
    """Train, and save every second step; return each rank's state at the end."""
    random = {}

    class Draws:
        @hookimpl
        def on_run_end(self, run):
            random[run.world.rank] = torch.get_rng_state()

    curve, every = (
        Curve(),
        ModelCheckpoint(
            dirpath=folder / "steps", filename="{step}", every_n_train_steps=2, save_top_k=-1
        ),
    )
    options = {
        "seed": 5,
        "accumulate_grad_batches": 2,
        "plugins": [*plugins, Keeps(), curve, every, Draws()],
        **options,
    }
    trainer, strategy = on_threads(max_epochs=epochs, output=folder / "run", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(
            Own(), loader(shuffle=True), DataLoader(samples(7), batch_size=2), ckpt_path=path
        )
    told = [
        text
        for one in caught
        if "ckpt" in (text := str(one.message)) and "belongs to another folder" not in text
    ]
    found = []
    for run in strategy.runs:
        plugins = {type(part.plugin): part.plugin for part in run.trainer.setup.parts}
        found.append(
            SimpleNamespace(
                weights=weights(run.module),
                optimizer=run.optimizers[0].state_dict(),
                scheduler=run.schedulers[0].scheduler.state_dict(),
                metrics=run.metrics,
                counters=[run.step, run.epoch, run.batch_idx, run.loop.batches_seen],
                random=random[run.world.rank],
                seen=plugins[Keeps].seen,
                files=plugins[ModelCheckpoint].state_dict(),
                lines=curve.values,
                told=told,
            )
        )
    return found


def assert_same_end(a, b):
    assert equal(a.weights, b.weights)
    assert a.optimizer["param_groups"] == b.optimizer["param_groups"]
    assert all(
        equal(state, b.optimizer["state"][index]) for index, state in a.optimizer["state"].items()
    )
    assert (a.scheduler, a.metrics, a.counters, a.seen) == (
        b.scheduler,
        b.metrics,
        b.counters,
        b.seen,
    )
    assert torch.equal(a.random, b.random)
    assert not b.told


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run of two ranks, and their state at its end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, go(folder, 3)


@pytest.mark.parametrize("path", ["last", "steps/step=4.ckpt"])
def test_a_resumed_run_is_as_without_a_stop(whole, path, tmp_path):
    folder, expected = whole
    if path == "last":
        go(tmp_path, 1)
    found = go(tmp_path, 3, path if path == "last" else folder / path)
    for a, b in zip(expected, found, strict=True):
        assert_same_end(a, b)
        assert b.files == found[0].files  # rank 0's best value, with the identity of each file
        assert b.files["identity"]
    lines = found[0].lines
    assert lines
    assert expected[0].lines[-len(lines) :] == lines


@pytest.mark.parametrize(
    "options", [{"precision": "16-mixed"}, {"seed": None}], ids=["16-mixed", "no seed"]
)
def test_a_resumed_run_is_as_without_a_stop_with(options, tmp_path):
    torch.manual_seed(1)  # without a seed, each rank begins with the caller's generators
    expected = go(tmp_path / "whole", 1, **options)
    found = go(tmp_path / "rest", 1, tmp_path / "whole" / "steps" / "step=2.ckpt", **options)
    for a, b in zip(expected, found, strict=True):
        assert_same_end(a, b)


def test_each_rank_has_its_own_state(whole):
    folder, ranks = whole
    for rank, found in enumerate(ranks):
        assert found.seen == [100 * rank + step for step in range(1, 10)]
    state = torch.load(folder / "run" / "last.ckpt", weights_only=True)["fit"]
    assert [one["parts"]["Keeps"]["seen"][0] for one in state["ranks"]] == [1, 101]
    assert not torch.equal(
        state["ranks"][0]["random"]["torch"], state["ranks"][1]["random"]["torch"]
    )
    # State that is the same on all ranks is saved once.
    assert [name.partition(";")[0] for name in state["parts"]] == ["model_checkpoint"]
    assert list(state["ranks"][1]["parts"]) == ["Keeps"]


def test_every_rank_refuses_the_same_checkpoints(whole, tmp_path):
    told = {}

    class Tells:
        @hookimpl
        def on_exception(self, run, error):
            told[run.world.rank] = str(error)

    with pytest.raises(gt.UsageError, match="there is nothing left to do"):
        go(tmp_path, 3, whole[0] / "run" / "last.ckpt", plugins=[Tells()], first=1)
    assert told[0] == told[1]


# --- in a world of another size -------------------------------------------------------------------


def test_one_became_two(tmp_path):
    one_trainer(seed=5, output=tmp_path / "one").fit(Own(), loader(shuffle=True))
    first, second = go(tmp_path / "two", 3, tmp_path / "one" / "last.ckpt")
    (told,) = first.told  # only rank 0 warns
    assert (
        "no saved state for Keeps, which starts from scratch; "
        "no saved state for geartrain-callbacks[model_checkpoint]" in told
    )
    assert equal(first.weights, second.weights)
    for rank, found in enumerate((first, second)):  # 11 steps of the one, then twice 3 of the two
        assert found.counters[:2] == [17, 3]
        assert found.seen == [100 * rank + step for step in range(12, 18)]


def test_two_became_one(whole):
    folder, _ = whole
    file = torch.load(folder / "run" / "last.ckpt", weights_only=True)
    seen, keeps = {}, Keeps()

    class Looks(Own):
        def on_train_start(self):
            seen.update(weights(self))
            seen["step"] = self.trainer.global_step
            optimizer = self.trainer.run.optimizers[0].state_dict()["state"]
            assert all(
                equal(state, file["fit"]["optimizers"][0]["state"]["state"][index])
                for index, state in optimizer.items()
            )

    one = one_trainer(max_epochs=4, plugins=[keeps])
    with pytest.warns(
        UserWarning,
        match=r"no saved state for Keeps \(it has one for each of 2 ranks, not 1\), which",
    ):
        one.fit(Looks(), loader(), ckpt_path=folder / "run" / "last.ckpt")
    assert keeps.seen == list(range(10, 21))
    assert seen.pop("step") == 9
    assert equal(seen, file["model"])
    assert one.global_step == 9 + 11


@pytest.mark.parametrize(
    ("step", "epochs", "message", "left"),
    [
        (4, 2, r"saved by 2 ranks after 2 batches of an epoch, which 1 ranks resume after 4", 7),
        # Two ranks have 6 batches each, the last of them padded; one has 11, and no 12.
        (6, 3, r"saved by 2 ranks after 6 batches of an epoch, which 1 ranks resume after 11", 11),
    ],
)
def test_two_became_one_within_an_epoch(whole, step, epochs, message, left):
    one = one_trainer(max_epochs=epochs)
    with pytest.warns(UserWarning, match=message) as caught:
        one.fit(Own(), loader(), ckpt_path=whole[0] / "steps" / f"step={step}.ckpt")
    assert any("state of Keeps, model_checkpoint; " in str(found.message) for found in caught)
    assert one.global_step == step + left


class Ids(gt.Module):
    """Keeps the samples of each epoch."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), {0: [], 1: []}

    def training_step(self, batch, batch_idx):
        self.seen[self.current_epoch] += batch.flatten().int().tolist()
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Numbers(gt.DataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(torch.arange(96.0).reshape(-1, 1), self.batch_size, shuffle=True)


class Stateful(Numbers):
    """Its loaders are made again after its state is loaded."""

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("ranks", "step", "data"),
    [(3, 4, Numbers), (3, 5, Numbers), (4, 3, Numbers), (2, 5, Numbers), (3, 5, Stateful)],
)
def test_each_sample_of_the_epoch_comes_once_with_another_number_of_ranks(
    tmp_path, ranks, step, data
):
    def fit(ranks, path=None, **options):
        trainer, strategy = on_threads(ranks, seed=1, max_epochs=2, **options)
        trainer.fit(Ids(), datamodule=data(), ckpt_path=path)
        modules = [run.module for run in strategy.runs]
        return [[i for module in modules for i in module.seen[epoch]] for epoch in (0, 1)]

    every = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=step)
    before = 3 if ranks == 2 else 2
    done, _ = fit(before, plugins=[every], max_steps=step)
    with pytest.warns(UserWarning, match="each of its samples comes once"):
        rest, second = fit(ranks, tmp_path / f"step={step}.ckpt")
    assert set(done) | set(rest) == set(range(96)) == set(second)
    assert len(rest) < 96 - len(done) + ranks  # the last round of the shards is filled up


@pytest.mark.parametrize(
    ("before", "ranks", "batch_size"), [(2, 1, 8), (2, 3, 4), (2, 2, 8), (2, 2, 6), (1, 1, 8)]
)
def test_each_sample_comes_once_with_batches_of_another_size(tmp_path, before, ranks, batch_size):
    def fit(ranks, batch_size, path=None, **options):
        trainer, strategy = on_threads(ranks, seed=1, max_epochs=1, **options)
        trainer.fit(Ids(), datamodule=Numbers(batch_size), ckpt_path=path)
        return [i for run in strategy.runs for i in run.module.seen[0]]

    every = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2)
    done = fit(before, 4, plugins=[every], max_steps=2)
    with pytest.warns(UserWarning, match="each of its samples comes once"):
        rest = fit(ranks, batch_size, tmp_path / "step=2.ckpt")
    assert set(done) | set(rest) == set(range(96))
    assert len(rest) < 96 - len(done) + ranks


class Sums(Ids):
    """Logs numbers of the epoch, each over the samples of all ranks."""

    def on_train_epoch_start(self):
        self.log("epochs", 1.0, sync_dist=True, reduce_fx="sum")

    def training_step(self, batch, batch_idx):
        options = {"on_step": False, "on_epoch": True}
        self.log("mean", batch.mean(), sync_dist=True, **options)
        self.log("own", batch.mean(), **options)
        self.log("median", batch.mean(), sync_dist=True, reduce_fx=torch.median, **options)
        for name in ("sum", "min", "max"):
            value = getattr(batch, name)()
            self.log(name, value, sync_dist=True, reduce_fx=name, batch_size=1, **options)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("before", "step", "ranks", "batch_size"),
    [(2, 6, 3, 4), (3, 2, 2, 4), (2, 1, 4, 4), (2, 2, 1, 4), (2, 2, 2, 8)],
)
def test_the_epochs_sums_and_means_go_on_with_another_number_of_ranks(
    tmp_path, before, step, ranks, batch_size
):
    def fit(ranks, batch_size, path=None, **options):
        trainer, _ = on_threads(ranks, seed=1, max_epochs=1, **options)
        trainer.fit(Sums(), datamodule=Numbers(batch_size), ckpt_path=path)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    every = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=step)
    fit(before, 4, plugins=[every], max_steps=step)
    with pytest.warns(UserWarning, match="comes once$"):
        found = fit(ranks, batch_size, tmp_path / f"step={step}.ckpt")
    assert found["mean"] == 95 / 2
    assert (found["sum"], found["min"], found["max"]) == (96 * 95 / 2, 0, 95)
    assert found["epochs"] == max(before, ranks)  # each rank has logged once
    assert 30 < found["median"] < 65


@pytest.mark.parametrize(("batch_size", "twice"), [(2, 0), (8, 0), (6, 2)])
def test_one_process_resumes_with_batches_of_another_size(tmp_path, batch_size, twice):
    def fit(batch_size, path=None, **options):
        module = Ids()
        one_trainer(seed=1, **options).fit(module, datamodule=Numbers(batch_size), ckpt_path=path)
        return module.seen[0]

    every = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2)
    done = fit(4, plugins=[every], max_steps=2)
    message = "some of its samples may come twice" if twice else "each of its samples comes once"
    with pytest.warns(UserWarning, match=message):
        rest = fit(batch_size, tmp_path / "step=2.ckpt")
    assert set(done) | set(rest) == set(range(96))
    assert len(rest) == 96 - len(done) + twice
