"""fit(ckpt_path=...): a run that resumes ends bit for bit as an uninterrupted one."""

import copy
import itertools
import json
import os
import random
import re
import shutil
import warnings
from contextlib import nullcontext
from functools import partial
from operator import attrgetter

import numpy
import pytest
import torch
from small_models import (
    EvalNet,
    Loggers,
    Net,
    Stream,
    assert_equal,
    loader,
    samples,
    trainer,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    model_checkpoint,
)
from geartrain.checkpoint import files as checkpoint_file
from geartrain.checkpoint.training_state import load_optimizer

Adam = partial(torch.optim.Adam, lr=0.02)


class Random(gt.Module):
    """Draws from every generator: dropout, a shuffled loader, noise of NumPy and of Python."""

    def __init__(self, scheduler=None, interval="step", monitor=None):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 6), nn.Dropout(0.3), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 1)
        )
        self.scheduler, self.interval, self.monitor = scheduler, interval, monitor

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = float(numpy.random.rand()) + random.random()
        loss = nn.functional.mse_loss(self.layers(x), y + 0.1 * noise)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss * 0.01  # with these weights no gradient overflows float16 at the first scale

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), y))

    def configure_optimizers(self):
        optimizer = Adam(self.parameters())
        if self.scheduler is None:
            return optimizer
        scheduler = {
            "scheduler": self.scheduler(optimizer),
            "interval": self.interval,
            "monitor": self.monitor,
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def train(
    folder, epochs=2, path=None, module=Random, train=None, val=None, plugins=(), steps=True, **more
):
    """Fit into a folder, with a checkpoint every third of an epoch's 7 steps.

    Return the trainer and the log.
    """
    lines = Loggers()
    every = ModelCheckpoint(
        dirpath=folder / "steps", filename="{step}", every_n_train_steps=3, save_top_k=-1
    )
    plugins = [lines, *([every] if steps else []), *plugins]
    options = {"seed": 3, "log_every_n_steps": 2, **more}
    one = trainer(output=folder / "run", max_epochs=epochs, plugins=plugins, **options)
    # The module is made after the trainer, which seeds.
    module = module if isinstance(module, nn.Module) else module()
    train = DataLoader(samples(28), batch_size=4, shuffle=True) if train is None else train
    val = DataLoader(samples(9), batch_size=4) if val is None else val
    one.fit(module, train, val, ckpt_path=path)
    return one, lines.lines


def assert_same_end(a, b):
    """Assert that two trainers have ended with the same state, bit for bit."""
    assert_equal(a.run.module, b.run.module)
    for mine, theirs in zip(a.run.optimizers, b.run.optimizers, strict=True):
        mine, theirs = mine.state_dict(), theirs.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for index, state in mine["state"].items():
            assert all(
                torch.equal(value, theirs["state"][index][name]) for name, value in state.items()
            )
    for mine, theirs in zip(a.run.schedulers, b.run.schedulers, strict=True):
        assert mine.scheduler.state_dict() == theirs.scheduler.state_dict()
    assert a.callback_metrics == b.callback_metrics
    counters = ("step", "epoch", "batch_idx", "loop.batches_seen")
    assert [attrgetter(name)(a.run) for name in counters] == [
        attrgetter(name)(b.run) for name in counters
    ]


def assert_rest(lines, of):
    """Assert that the log of a resumed run is the end of the whole run's log."""
    assert lines
    assert of[-len(lines) :] == lines


def assert_resumes(folder, whole, lines, step, **options):
    """Assert that a run from the checkpoint of a step ends as the whole one, with its log."""
    rest, more = train(folder / f"from {step}", path=step_file(folder / "whole", step), **options)
    assert_same_end(rest, whole)
    assert_rest(more, lines)


def step_file(folder, step):
    return folder / "steps" / f"step={step}.ckpt"


StepLR = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7)
Plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.9, patience=0)
CASES = {
    "plateau by step": ({"scheduler": Plateau, "monitor": "loss"}, {"log_every_n_steps": 50}),
    "plateau by step after validations": (
        {"scheduler": Plateau, "monitor": "val_loss"},
        {"val_check_interval": 2, "gradient_clip_val": 0.001},
    ),
    "plateau by epoch": ({"scheduler": Plateau, "interval": "epoch", "monitor": "val_loss"}, {}),
    "schedule by step": (
        {"scheduler": StepLR},
        {"accumulate_grad_batches": 2, "num_sanity_val_steps": 2},
    ),
    "schedule by epoch": (
        {"scheduler": StepLR, "interval": "epoch"},
        {"check_val_every_n_epoch": 2},
    ),
    "validation across epochs": (
        {},
        {"val_check_interval": 5, "check_val_every_n_epoch": None, "limit_train_batches": 6},
    ),
    "bf16-true": ({}, {"precision": "bf16-true"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_as_without_a_stop(tmp_path, case):
    made, options = CASES[case]
    options["module"] = partial(Random, **made)
    whole, lines = train(tmp_path / "whole", **options)
    after = torch.get_rng_state()
    train(tmp_path / "first", epochs=1, **options)
    # After the first epoch, and within it.
    for name, path in (("first", "last"), ("rest", step_file(tmp_path / "whole", 3))):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(99)
        rest, more = train(tmp_path / name, path=path, **options)
        assert_same_end(rest, whole)
        assert_rest(more, lines)
        assert torch.equal(torch.get_rng_state(), after)


Cosine = torch.optim.lr_scheduler.CosineAnnealingLR


@pytest.mark.parametrize(
    ("scheduler", "other", "words"),
    [
        (None, None, "Adam's lr 0.02 in the file and 0.5 now"),
        (StepLR, StepLR, "Adam's lr 0.02 in the file and 0.5 now"),
        (
            partial(Cosine, T_max=7),
            partial(Cosine, T_max=21),
            "CosineAnnealingLR's T_max 7 in the file and 21 now",
        ),
    ],
)
def test_settings_that_differ_from_the_code_are_a_warning(tmp_path, scheduler, other, words):
    class Changed(Random):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.5 if scheduler is other else 0.02)
            return [optimizer], [] if other is None else [
                {"scheduler": other(optimizer), "interval": "step"}
            ]

    train(tmp_path, epochs=1, module=partial(Random, scheduler), steps=False)
    with pytest.warns(UserWarning, match=f"last.ckpt has {words}. The checkpoint"):
        train(tmp_path, epochs=2, module=partial(Changed, other), path="last", steps=False)


def test_without_a_seed(tmp_path):
    whole, lines = train(tmp_path / "whole", seed=None)
    assert_resumes(tmp_path, whole, lines, 9, seed=None)


@pytest.mark.parametrize(
    ("sanity", "steps"),
    [(0, [3, 9]), (1, [6])],  # before the first validation, in the second epoch; after a validation
)
def test_persistent_workers_draw_their_seed_once(tmp_path, sanity, steps):
    """A loader draws it at the start of workers, from the generator of dropout and of shuffling."""
    workers = {"batch_size": 4, "num_workers": 1, "persistent_workers": True}

    def loaders():
        return {
            "train": DataLoader(samples(28), shuffle=True, **workers),
            "val": DataLoader(samples(9), **workers),
            "num_sanity_val_steps": sanity,
            "val_check_interval": 4,
        }

    whole, lines = train(tmp_path / "whole", **loaders())
    after = torch.get_rng_state()
    for step in steps:
        assert_resumes(tmp_path, whole, lines, step, **loaders())
        assert torch.equal(torch.get_rng_state(), after)


class Augmented(Dataset):
    """Draws from the three global generators for each sample, and counts what it reads here."""

    def __init__(self, n=28):
        self.samples, self.read = samples(n), 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.read += 1
        x, y = self.samples[index]
        return x + torch.rand(3) + random.random() + float(numpy.random.rand()), y


@pytest.mark.parametrize("persistent", [False, True])
def test_augmentation_in_workers_resumes_exactly(tmp_path, persistent):
    def loaders(workers=2):
        of_workers = {"num_workers": workers, "persistent_workers": persistent}
        return {"train": DataLoader(Augmented(), batch_size=4, shuffle=True, **of_workers)}

    whole, lines = train(tmp_path / "whole", **loaders())
    for step in 3, 9:
        assert_resumes(tmp_path, whole, lines, step, **loaders())
    alone, lines_of_one = train(tmp_path / "alone", **loaders(workers=1))
    assert_same_end(alone, whole)
    assert lines_of_one == lines


def test_batches_of_two_epochs_have_other_augmentation(tmp_path):
    seen = []

    class Keeps(Random):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(batch[0])

    data = DataLoader(Augmented(8), batch_size=4, num_workers=1)
    train(tmp_path, module=Keeps, train=data, steps=False)
    assert len({tuple(batch.flatten().tolist()) for batch in seen}) == 4


@pytest.mark.parametrize("limit", [None, 6])
def test_a_resume_reads_only_the_last_batch_before_its_position(tmp_path, limit):
    def loaders():
        data = DataLoader(Augmented(), batch_size=4, shuffle=True)
        return {"train": data, "limit_train_batches": limit, "num_sanity_val_steps": 0}

    whole, lines = train(tmp_path / "whole", **loaders())
    data = loaders()
    rest, more = train(tmp_path / "rest", path=step_file(tmp_path / "whole", 3), **data)
    assert_same_end(rest, whole)
    assert_rest(more, lines)
    batches = limit or 7
    assert data["train"].dataset.read == 4 * (1 + batches - 3 + batches)


def test_a_datasets_own_generator_is_replayed_in_its_first_epoch_and_named_later(tmp_path):
    class Noisy(Augmented):
        def __init__(self):
            super().__init__()
            self.generator = numpy.random.default_rng(0)

        def __getitem__(self, index):
            x, y = self.samples[index]
            return x + self.generator.random(dtype="float32"), y

    def loaders():
        data = Subset(Noisy(), range(28))
        return {"train": DataLoader(data, batch_size=4), "num_sanity_val_steps": 0}

    whole, lines = train(tmp_path / "whole", **loaders())
    assert_resumes(tmp_path, whole, lines, 3, **loaders())
    with pytest.warns(UserWarning, match="dataset of DataLoader of Subset has a random generator"):
        train(tmp_path / "rest", path=step_file(tmp_path / "whole", 9), **loaders())


def test_a_loaders_own_generator_continues(tmp_path):
    def own():
        generator = torch.Generator().manual_seed(8)
        return DataLoader(samples(28), batch_size=4, shuffle=True, generator=generator)

    whole, lines = train(tmp_path / "whole", train=own())
    for step in (3, 9):
        assert_resumes(tmp_path, whole, lines, step, train=own())


@pytest.mark.parametrize("event", ["start", "epoch_start", "batch_start", "epoch_end", "end"])
def test_a_checkpoint_within_a_validation_validates_again(tmp_path, event):
    """It is not done before its metrics are reported, which is before ``on_validation_end``."""

    def save(*_):
        module.trainer.save_checkpoint(tmp_path / "a.ckpt")

    module, rest = EvalNet(), EvalNet()
    setattr(module, f"on_validation_{event}", save)
    first = trainer()
    first.fit(module, loader(), loader(8))
    one = trainer()
    one.fit(rest, loader(), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert len(rest.seen) == (0 if event == "end" else 2)
    assert one.callback_metrics["val_loss"] == first.callback_metrics["val_loss"]


@pytest.mark.parametrize(
    ("interval", "monitor"), [(1.0, "val_loss"), (1.0, "loss"), (3, None), (0.5, "loss")]
)
def test_a_checkpoint_after_a_validation_does_not_validate_again(tmp_path, interval, monitor):
    """At an epoch's end, within it, and at both."""

    def saves(name):
        return ModelCheckpoint(
            "val_loss",
            dirpath=tmp_path / name,
            filename="{step}",
            save_top_k=-1,
            save_on_train_epoch_end=False,
        )

    def steps(name):
        return sorted(int(path.stem[5:]) for path in (tmp_path / name).glob("*"))

    scheduler = Plateau if monitor else StepLR
    module = partial(Random, scheduler, "step" if monitor == "loss" else "epoch", monitor)
    options = {"val_check_interval": interval, "steps": False, "module": module}
    whole, lines = train(tmp_path / "whole", plugins=[saves("of whole")], **options)
    for step in steps("of whole")[:-1]:
        path = tmp_path / "of whole" / f"step={step}.ckpt"
        rest, more = train(
            tmp_path / str(step), path=path, plugins=[saves(f"of {step}")], **options
        )
        assert_same_end(rest, whole)
        assert_rest(more, lines)
        assert steps(f"of {step}") == [later for later in steps("of whole") if later > step]


# --- parts that keep state ------------------------------------------------------------------------


def test_callbacks_continue(tmp_path):
    def callbacks():
        best = ModelCheckpoint("val_loss", save_top_k=2, filename="{epoch}", save_last=True)
        by_steps = ModelCheckpoint(
            "val_loss", save_top_k=-1, every_n_train_steps=5, filename="by_steps-{step}"
        )
        # Its metric falls, so its count rises in each epoch.
        return [EMA(0.8), EarlyStopping("val_loss", mode="max", patience=30), best, by_steps]

    def names(paths):
        return [path.rpartition("/")[2] for path in paths]

    whole_own, rest_own, again = callbacks(), callbacks(), callbacks()
    whole, _ = train(tmp_path / "whole", epochs=3, plugins=whole_own)
    train(tmp_path / "first", epochs=1, plugins=callbacks())
    rest, _ = train(tmp_path / "first", epochs=3, path="last", plugins=rest_own)
    assert_same_end(rest, whole)
    assert rest_own[0].updates == whole_own[0].updates == 21
    assert rest_own[1].wait_count == 2
    assert rest_own[1].state_dict() == whole_own[1].state_dict()
    theirs = {
        path.replace("first", "whole"): score for path, score in rest_own[2].best_k_models.items()
    }
    assert theirs == whole_own[2].best_k_models
    files = [os.listdir(tmp_path / name / "run" / "checkpoints") for name in ("whole", "first")]
    assert sorted(files[0]) == sorted(files[1])
    # Step 5 is due still after step 6: its value comes with the validation of step 7.
    by_steps = [f"by_steps-step={step}.ckpt" for step in (7, 14, 21)]
    assert names(whole_own[3].best_k_models) == by_steps
    path = step_file(tmp_path / "whole", 6)
    rest, _ = train(tmp_path / "rest", epochs=3, path=path, plugins=again)
    assert_same_end(rest, whole)
    assert again[0].updates == 21
    assert names(again[3].best_k_models) == by_steps


def state_of_best(file):
    """Return the state of the only ModelCheckpoint in a file."""
    parts = file["fit"]["parts"].items()
    (state,) = (state for name, state in parts if name.startswith("model_checkpoint"))
    return state


def test_a_checkpoint_names_itself_as_the_best(tmp_path):
    best = ModelCheckpoint("val_loss", save_top_k=1, filename="best")
    train(tmp_path, epochs=1, plugins=[best], steps=False)
    state = state_of_best(torch.load(best.best_model_path, weights_only=True))
    assert (state["best_model_path"], state["best_k_models"]) == (
        "best.ckpt",
        {"best.ckpt": best.best_model_score},
    )
    assert state_of_best(torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)) == state


class Counts:
    """A user's plugin."""

    def __init__(self):
        self.steps, self.loaded = 0, None

    @hookimpl
    def on_step_end(self):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps, "tensor": torch.ones(2, requires_grad=True) * self.steps}

    def load_state_dict(self, state):
        self.loaded = state
        self.steps = state["steps"]


class CountsToo(Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def test_users_plugins_and_callbacks_continue(tmp_path):
    first, second, callback = Counts(), Counts(), CountsToo()
    second.steps = 100  # two of one name are distinguished by their order
    train(tmp_path, epochs=1, plugins=[first, second], callbacks=[callback])
    again = Counts(), Counts(), CountsToo()
    train(tmp_path, epochs=2, path="last", plugins=again[:2], callbacks=again[2:])
    assert [again[0].steps, again[1].steps, again[2].batches] == [14, 114, 14]
    assert torch.equal(again[0].loaded["tensor"], torch.full((2,), 7.0))


def test_state_is_loaded_before_the_hooks_are_frozen_and_after_the_optimizers_are_wrapped(tmp_path):
    seen = []

    class Looks(Counts):
        @hookimpl(wrapper=True)
        def wrap_optimizer(self):
            seen.append("wrap")
            return (yield)

        @hookimpl
        def on_run_start(self):
            seen.append("start")

        def load_state_dict(self, state):
            seen.append("load")

    train(tmp_path, epochs=1, plugins=[Looks()])
    seen.clear()
    train(tmp_path, epochs=2, path="last", plugins=[Looks()])
    assert seen == ["wrap", "load", "start"]


def test_added_and_removed_parts(tmp_path):
    train(tmp_path, epochs=1, plugins=[Counts()])
    with pytest.warns(UserWarning, match="last.ckpt") as caught:
        train(tmp_path, epochs=2, path="last", plugins=[EarlyStopping("val_loss")])
    (text,) = [str(one.message) for one in caught if "state" in str(one.message)]
    assert "it has state of Counts, which this run does not have" in text
    assert (
        "no saved state for geartrain-callbacks[early_stopping], which starts from scratch" in text
    )


class Named(Net):
    def __init__(self, name):
        super().__init__()


def test_a_file_has_the_plan_with_versions_and_hyperparameters(tmp_path):
    trainer(output=tmp_path, plugins=[EMA()]).fit(Named("a"), loader())
    plan = json.loads(torch.load(tmp_path / "last.ckpt", weights_only=True)["plan"])
    assert plan == json.loads((tmp_path / "plan.json").read_text())
    assert plan["hyperparameters"] == {"name": "a"}
    assert ("ema", "0.1.0") in [(part["name"], part["version"]) for part in plan["plugins"]]


def test_state_that_could_not_be_read_again_is_left_out_with_a_warning(tmp_path):
    class Odd(Counts):
        def state_dict(self):
            return {"path": tmp_path}

    with pytest.warns(UserWarning, match=r"Odd: its state_dict\(\) holds pathlib\.\w+Path.*Fix"):
        train(tmp_path, epochs=1, plugins=[Odd()])
    (path,) = tmp_path.rglob("last.ckpt")
    state = torch.load(path, weights_only=True)
    assert state["fit"]["left_out"] == ["Odd"]
    with pytest.warns(UserWarning, match="no saved state for Odd, which starts from scratch"):
        train(tmp_path, epochs=2, path="last", plugins=[Odd()])


# --- optimizers -----------------------------------------------------------------------------------


class Replaces:
    """Replaces the module's optimizer by another with the same groups, as horovod does."""

    replaces = frozenset({"wrap_optimizer"})

    @hookimpl
    def wrap_optimizer(self, optimizer):
        other = type(optimizer)(optimizer.param_groups)
        assert other.param_groups[0] is optimizer.param_groups[0]
        return other


def test_an_optimizer_of_a_strategy_gets_the_state_and_its_scheduler_still_changes_it(tmp_path):
    options = {"module": partial(Random, StepLR), "plugins": [Replaces()]}
    whole, lines = train(tmp_path / "whole", **options)
    assert_resumes(tmp_path, whole, lines, 9, **options)
    assert whole.run.optimizers[0].param_groups[0]["lr"] < 0.002


def test_a_number_in_an_optimizers_state_keeps_its_dtype():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.NAdam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    resumed = torch.optim.NAdam([parameter])
    load_optimizer(resumed, optimizer.state_dict())
    product = optimizer.state[parameter]["mu_product"]
    assert product.dtype == torch.float32  # torch's load gives bfloat16
    assert torch.equal(resumed.state[parameter]["mu_product"], product)


def test_an_optimizer_may_keep_the_state_that_it_loads_elsewhere():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    elsewhere = torch.optim.Adam([parameter])
    elsewhere.register_load_state_dict_pre_hook(lambda _, state: {**state, "state": {}})
    load_optimizer(elsewhere, optimizer.state_dict())
    assert not elsewhere.state


def test_manual_optimisation(tmp_path):
    class Manual(Random):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    options = {"module": Manual, "precision": "16-mixed"}
    whole, lines = train(tmp_path / "whole", **options)
    assert_resumes(tmp_path, whole, lines, 3, **options)


def test_a_scale_of_16_mixed_continues(tmp_path):
    class Overflows(Random):
        def training_step(self, batch, batch_idx):
            factor = 1e38 if self.global_step < 3 else 1.0
            return super().training_step(batch, batch_idx) * factor

    scales = []

    class Looks:
        @hookimpl
        def on_epoch_start(self, run):
            scales.append(
                next(
                    part.plugin for part in run.hooks.parts if part.info.name == "16-mixed"
                )._scaler.get_scale()
            )

    train(tmp_path, epochs=1, module=Overflows, precision="16-mixed", plugins=[Looks()])
    train(
        tmp_path, epochs=2, path="last", module=Overflows, precision="16-mixed", plugins=[Looks()]
    )
    assert scales == [65536.0, 65536.0 / 8]


# --- errors ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a run of one epoch."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    train(folder, epochs=1)
    return folder


def refused(tmp_path, path, words, error, **options):
    seen = []

    class Tells:
        @hookimpl
        def on_run_start(self):
            seen.append("start")

    with pytest.raises(error, match=words):
        train(tmp_path, path=path, plugins=[Tells()], steps=False, **options)
    assert not seen


def test_weights_alone_are_not_enough_to_resume(tmp_path, saved):
    state = torch.load(saved / "run" / "last.ckpt", weights_only=True)
    del state["fit"]
    checkpoint_file.write(state, tmp_path / "weights.ckpt")
    refused(
        tmp_path,
        tmp_path / "weights.ckpt",
        "has weights, but not the state that a fit needs.*Fix: start from the weights, with",
        TrainingError,
    )
    module = Random()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(max_epochs=1).fit(module, loader(), checkpoint=tmp_path / "weights.ckpt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fit: fit.update(format=99), "whose format 99 this version does not know"),
        (
            lambda fit: fit["optimizers"][0].update({"class": "SGD"}),
            "optimizer 0 was SGD, and is Adam now.*Fix: use the same in the same order",
        ),
        (
            lambda fit: fit["optimizers"][0]["state"]["param_groups"].append({"params": []}),
            "the state of Adam does not fit",
        ),
        (
            lambda fit: fit["schedulers"].append({"class": "StepLR", "state": {}}),
            "scheduler 0 was StepLR, and is none now",
        ),
    ],
)
def test_a_file_that_does_not_fit(tmp_path, saved, change, words):
    state = torch.load(saved / "run" / "last.ckpt", weights_only=True)
    change(state["fit"])
    checkpoint_file.write(state, tmp_path / "odd.ckpt")
    refused(tmp_path, tmp_path / "odd.ckpt", words, TrainingError)


class Reordered(Random):
    """Two layers of one shape in another order: torch would swap their momenta."""

    def __init__(self, swapped=False, all_of_it=True):
        super().__init__()
        for name in ("b", "a") if swapped else ("a", "b"):
            self.add_module(name, nn.Linear(3, 3))
        self.all_of_it = all_of_it

    def training_step(self, batch, batch_idx):
        return self.b(self.a(batch[0])).square().mean()

    def configure_optimizers(self):
        return Adam(list(self.parameters())[: None if self.all_of_it else -1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"swapped": True},
            r"parameter 6 of Adam was a\.weight, and is b\.weight now\. Fix: use the same",
        ),
        ({"all_of_it": False}, r"parameter 9 of Adam was b\.bias, and is none now\. Fix"),
    ],
)
def test_parameters_in_another_order(tmp_path, change, words):
    train(tmp_path, epochs=1, module=Reordered)
    last = tmp_path / "run" / "last.ckpt"
    refused(tmp_path, last, words, TrainingError, module=partial(Reordered, **change))


class Exchanged(Random):
    """Two optimizers with a scheduler each, in the order of ``first``."""

    def __init__(self, first=0):
        super().__init__()
        self.first = first

    def configure_optimizers(self):
        both = [Adam(p) for p in (list(self.parameters())[:2], list(self.parameters())[2:])]
        schedulers = [StepLR(optimizer) for optimizer in both]
        return both, [schedulers[self.first], schedulers[1 - self.first]]


def test_schedulers_in_another_order(tmp_path):
    train(tmp_path, epochs=1, module=Exchanged)
    words = "scheduler 0 was StepLR of optimizer 0, and is StepLR of optimizer 1 now. Fix: use"
    last = tmp_path / "run" / "last.ckpt"
    refused(tmp_path, last, words, TrainingError, module=partial(Exchanged, first=1))


@pytest.mark.parametrize(
    ("kind", "words"),
    [("half", "is damaged: its contents"), ("code", "could not be read as a checkpoint")],
)
def test_a_file_that_is_no_checkpoint(tmp_path, saved, kind, words):
    whole, odd = (saved / "run" / "last.ckpt").read_bytes(), tmp_path / "run" / "last.ckpt"
    odd.parent.mkdir()
    if kind == "code":
        torch.save(Random(), odd)
    else:
        odd.write_bytes(whole[: len(whole) // 2])
    for path, expected in (
        (odd, rf"last\.ckpt {words}.*Fix: use another file"),
        ("auto", r"all checkpoints.*damaged: .*last\.ckpt\. Fix:"),
    ):
        with pytest.raises(TrainingError, match=expected) as caught:
            train(tmp_path, path=path)
        assert "weights_only" not in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"epochs": 1},
            "nothing left to do.*has 1 epochs done, and max_epochs=1.*Fix: use a larger max_epochs",
        ),
        (
            {"epochs": -1, "max_steps": 7},
            "nothing left to do.*has 7 steps done, and max_steps=7.*Fix",
        ),
    ],
)
def test_nothing_left_to_do(tmp_path, saved, options, words):
    refused(tmp_path, saved / "run" / "last.ckpt", words, UsageError, **options)


ENDINGS = {
    "epochs": (list, {}),
    "steps": (list, {"epochs": -1, "max_steps": 9}),
    "stopping": (lambda: [EarlyStopping("val_loss", mode="max", patience=1)], {"epochs": 9}),
    "time": (lambda: [Timer(1e-9, interval="epoch")], {"epochs": 9}),
    "average": (lambda: [StochasticWeightAveraging(0.05, 1)], {}),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_auto_trains_nothing_after_the_end(tmp_path, ending):
    plugins, options = ENDINGS[ending]
    whole, _ = train(tmp_path, plugins=plugins(), **options)
    state, saved = torch.get_rng_state(), (tmp_path / "run" / "last.ckpt").read_bytes()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(99)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same, lines = train(tmp_path, path="auto", plugins=plugins(), **options)
    said = "there is nothing left to do: .*last.ckpt has . (epochs|steps) done, and max_"
    warned = [one for one in caught if re.match(said, str(one.message))]
    assert len(warned) == (ending not in ("stopping", "time"))
    assert lines == []
    assert_equal(same.run.module, whole.run.module)
    assert same.callback_metrics == whole.callback_metrics
    assert (same.global_step, same.current_epoch) == (whole.global_step, whole.current_epoch)
    assert torch.equal(torch.get_rng_state(), state)
    assert (tmp_path / "run" / "last.ckpt").read_bytes() == saved
    same.validate(same.run.module, DataLoader(samples(9), batch_size=4))


def test_after_a_kill_between_two_last_checkpoints_both_are_of_the_end(tmp_path):
    last = tmp_path / "run" / "last.ckpt"
    for epochs in (1, 2):  # the second fit is killed before it saves last.ckpt
        before = last.read_bytes() if last.exists() else b""
        plugin = ModelCheckpoint(save_last=True)
        whole, _ = train(tmp_path, epochs=epochs, path="auto", plugins=[plugin], steps=False)
    last.write_bytes(before)
    os.utime(last, (0, 0))
    plugin = ModelCheckpoint(save_last=True)
    same, _ = train(tmp_path, epochs=2, path="auto", plugins=[plugin], steps=False)
    assert_equal(same.run.module, whole.run.module)
    assert torch.load(last, weights_only=True)["epoch"] == 2


def test_early_stopping_with_more_patience_continues_after_its_end(tmp_path):
    for patience, epochs in ((1, 2), (3, 4)):
        stopping = EarlyStopping("val_loss", mode="max", patience=patience)
        one, _ = train(tmp_path, path="auto", epochs=9, plugins=[stopping])
        assert one.current_epoch == epochs


@pytest.mark.parametrize("ending", ["steps", "stopping"])
def test_a_checkpoint_before_the_end_of_the_last_epoch(tmp_path, ending):
    """Training is over there: only the rest of that epoch is left, as its validation."""
    plugins, options = ENDINGS[ending]
    options = {**options, "val_check_interval": 3} if ending == "stopping" else options
    whole, lines = train(tmp_path / "whole", plugins=plugins(), **options)
    path = step_file(tmp_path / "whole", whole.global_step // 3 * 3)
    rest, more = train(tmp_path / "rest", path=path, plugins=plugins(), **options)
    assert_same_end(rest, whole)
    assert_rest(more, lines)


def test_an_epoch_that_is_now_shorter(tmp_path, saved):
    words = "saved after 6 batches of an epoch, which now has 4"
    refused(tmp_path, step_file(saved, 6), words, UsageError, limit_train_batches=4)


def test_ckpt_path_and_checkpoint_contradict_each_other():
    with pytest.raises(UsageError, match="Fix: give one of them"):
        trainer().fit(Net(), loader(), ckpt_path="last", checkpoint="last")


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(UsageError, match=r"has saved no last checkpoint.*Fix.*ckpt_path='auto'"):
        train(tmp_path, path="last")
    assert not (tmp_path / "run").exists()


# --- the checkpoint that a run resumes from -------------------------------------------------------


def test_the_runs_folder_is_continued(tmp_path):
    csv = {"csv": {"path": str(tmp_path / "table.csv")}}
    train(tmp_path, epochs=1, plugins=["csv"], plugin_options=csv, steps=False)
    first = (tmp_path / "run" / "metrics.jsonl").read_text(), (tmp_path / "table.csv").read_text()
    train(tmp_path, epochs=2, path="last", plugins=["csv"], plugin_options=csv, steps=False)
    whole = (tmp_path / "run" / "metrics.jsonl").read_text(), (tmp_path / "table.csv").read_text()
    assert all(
        after.startswith(before) and len(after) > len(before)
        for before, after in zip(first, whole, strict=True)
    )
    epochs = [json.loads(line)["epoch"] for line in whole[0].splitlines()]
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 14


def test_auto_starts_from_scratch_without_a_checkpoint_and_resumes_with_one(tmp_path):
    one, _ = train(tmp_path, epochs=1, path="auto")
    assert one.global_step == 7
    (
        tmp_path / "run" / "last.ckpt"
    ).unlink()  # as after a crash in the first epoch: the folder has a plan and no checkpoint
    one, _ = train(tmp_path, epochs=1, path="auto")
    assert one.global_step == 7
    one, _ = train(tmp_path, epochs=2, path="auto")
    assert one.global_step == 14


def test_last_is_the_newest_in_the_runs_folder(tmp_path):
    """Also that of a ModelCheckpoint in a process that has ended."""

    class Stops(Random):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 10:
                raise KeyError("by hand")

    def plugins():
        return [ModelCheckpoint(every_n_train_steps=2, save_last=True)]

    whole, lines = train(tmp_path / "whole", epochs=2, steps=False)
    with pytest.raises(KeyError):
        train(tmp_path / "run", epochs=2, module=Stops, plugins=plugins(), steps=False)
    rest, more = train(tmp_path / "run", epochs=2, path="last", plugins=plugins(), steps=False)
    assert (
        more[0][0] == 10
    )  # its flush came after its checkpoint; and not after the first epoch, which is step 7
    assert_same_end(rest, whole)
    assert_rest(more, lines)


def test_a_run_that_resumes_makes_no_sanity_check(tmp_path):
    module = EvalNet()
    train(tmp_path, epochs=1, module=EvalNet)
    train(tmp_path, epochs=2, path="last", module=module, num_sanity_val_steps=2)
    assert {stage for stage, *_ in module.seen} == {"validate"}


# --- loaders that cannot resume -------------------------------------------------------------------


class Lines(IterableDataset):
    def __iter__(self):
        return iter(samples(28))


def test_a_stream_is_skipped_with_a_warning(tmp_path):
    whole, lines = train(tmp_path / "whole", train=DataLoader(Lines(), batch_size=4))
    words = "DataLoader of Lines cannot be told where to resume: 3 batches are taken"
    with pytest.warns(UserWarning, match=words):
        assert_resumes(tmp_path, whole, lines, 3, train=DataLoader(Lines(), batch_size=4))


def test_streams_with_persistent_workers_have_a_warning(tmp_path):
    stream = DataLoader(Lines(), batch_size=4, num_workers=1, persistent_workers=True)
    train(tmp_path, epochs=1, train=stream)
    words = "has persistent workers, whose random numbers start again: 0 batches are taken"
    with pytest.warns(UserWarning, match=words):
        train(tmp_path, epochs=2, path="last", train=stream)


def test_an_iterator_is_skipped_with_a_warning(tmp_path):
    batches = [batch for _ in range(3) for batch in loader(28)]
    train(tmp_path, epochs=1, train=iter(batches), limit_train_batches=7)
    with pytest.warns(UserWarning, match="is an iterator, which continues from its own position"):
        train(tmp_path, epochs=2, path="last", train=iter(batches), limit_train_batches=7)


def test_batches_without_a_length(tmp_path):
    whole, lines = train(tmp_path / "whole", train=Stream(loader(28)))
    assert_resumes(tmp_path, whole, lines, 9, train=Stream(loader(28)))
    short, path = Stream(itertools.islice(loader(28), 3)), step_file(tmp_path / "whole", 6)
    words = "saved after 6 batches of an epoch, and the loader has only 3"
    with pytest.raises(TrainingError, match=words):
        train(tmp_path / "short", path=path, train=short)


def test_workers(tmp_path):
    def one_worker():
        return DataLoader(samples(28), batch_size=4, shuffle=True, num_workers=1)

    whole, lines = train(tmp_path / "whole", train=one_worker())
    assert_resumes(tmp_path, whole, lines, 3, train=one_worker())


def test_a_users_reduction_continues_when_it_is_logged_again(tmp_path):
    class Middle(Random):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("own", loss, on_step=False, on_epoch=True, reduce_fx=lambda v: v.median())
            return loss

    options = {"epochs": 1, "module": Middle, "limit_train_batches": 6}
    whole, lines = train(tmp_path / "whole", **options)
    assert_resumes(tmp_path, whole, lines, 3, **options)
    rest, _ = train(tmp_path / "end", path=step_file(tmp_path / "whole", 6), **options)
    assert "own" not in rest.callback_metrics
    assert rest.callback_metrics["loss_epoch"] == whole.callback_metrics["loss_epoch"]


def test_lost_outputs_of_an_epoch_are_a_warning(tmp_path):
    class Collects(Random):
        def training_epoch_end(self, outputs):
            self.outputs = len(outputs)

    train(tmp_path / "whole", epochs=1, module=Collects)
    module = Collects()
    with pytest.warns(UserWarning, match="gets the outputs from batch 3 of this epoch on"):
        train(tmp_path / "rest", epochs=1, path=step_file(tmp_path / "whole", 3), module=module)
    assert module.outputs == 4


def test_torchmetrics_objects_continue(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Random):
        def __init__(self):
            super().__init__()
            self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
            self.group = torchmetrics.MetricCollection(
                [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()]
            )

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss.detach())
            self.all.update(loss.detach())
            self.group(loss.detach(), torch.tensor(0.5))
            self.log("mean", self.mean, on_epoch=True, on_step=False)
            self.log_dict(self.group, on_epoch=True, on_step=True)
            return loss

        def on_train_epoch_end(self):
            self.log("several", float(self.all.compute().sum()))
            self.all.reset()

    options = {"module": Measured, "limit_train_batches": 6}
    whole, lines = train(tmp_path / "whole", **options)
    for step in (3, 6):  # within an epoch, and after its last step
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="no step of the first epoch trained")
            assert_resumes(tmp_path, whole, lines, step, **options)


class Again:
    """Calls the worker again after an error, with a checkpoint in memory, as elastic ones do."""

    replaces = frozenset({"launch"})

    def __init__(self, commits_at, breaks_at):
        self.commits_at, self.breaks_at, self.commit, self.ends = commits_at, breaks_at, None, 0

    @hookimpl
    def launch(self, run, worker):
        try:
            return worker(0)
        except ZeroDivisionError:
            run.reset()
        return worker(0)

    @hookimpl(wrapper=True)
    def setup_process_group(self, run):
        run.loop.memory_checkpoint = copy.deepcopy(self.commit)
        return (yield)

    @hookimpl
    def on_step_end(self, run):
        if run.step == self.commits_at and self.commit is None:
            self.commit = copy.deepcopy(run.checkpoint(run.epoch))
        if run.step == self.breaks_at and not self.ends:
            self.ends = 1
            raise ZeroDivisionError


@pytest.mark.parametrize("breaks_at", [3, 9])
def test_a_run_resumes_in_the_same_process_from_a_checkpoint_in_memory(tmp_path, breaks_at):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole, lines = train(tmp_path / "whole", steps=False)
    broken, theirs = train(tmp_path / "broken", steps=False, plugins=[Again(3, breaks_at)])
    assert_same_end(whole, broken)
    assert (broken.global_step, broken.current_epoch) == (14, 2)
    assert theirs[-1] == lines[-1]
    assert broken.run.loop.resumed is None
    summary = json.loads((tmp_path / "broken" / "run" / "summary.json").read_text())
    assert summary["status"] == "done"


def test_a_run_that_failed_before_its_first_checkpoint_starts_from_scratch(tmp_path):
    broken, _ = train(tmp_path, steps=False, plugins=[Again(commits_at=-1, breaks_at=9)])
    assert (broken.global_step, broken.current_epoch) == (14, 2)


def test_a_checkpoint_in_memory_goes_before_a_file(tmp_path):
    train(tmp_path, epochs=1, steps=False)  # last.ckpt of step 7
    seen = []

    class Counts:
        @hookimpl
        def on_epoch_start(self, run):
            seen.append((run.epoch, run.step))

    train(tmp_path, path="last", plugins=[Again(commits_at=9, breaks_at=12), Counts()], steps=False)
    assert seen == [(1, 7), (1, 9)]


# --- files of model_checkpoint --------------------------------------------------------------------


def best_of(folder, epochs, path=None, keep=None, **options):
    """Fit and keep the two best files of a falling metric; return trainer and ModelCheckpoint."""

    class Falls(Random):
        def validation_step(self, batch, batch_idx):
            self.log("falls", -float(self.current_epoch))

    keep = keep or ModelCheckpoint(
        **{"monitor": "falls", "save_top_k": 2, "filename": "{epoch}", **options}
    )
    train(folder, epochs=epochs, path=path, module=Falls, plugins=[keep], steps=False)
    return keep


def names_in(folder):
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*.ckpt*") if path.is_file()
    )


def bytes_in(folder):
    return {name: (folder / name).read_bytes() for name in names_in(folder)}


def test_a_run_in_another_folder_leaves_the_files_of_the_first_one(tmp_path):
    best_of(tmp_path / "a", 2)
    before = bytes_in(tmp_path / "a")
    with pytest.warns(
        UserWarning,
        match=r"model_checkpoint\].*a/run/last\.ckpt belongs to another .*d/run/checkpoints",
    ):
        keep = best_of(tmp_path / "d", 4, path=tmp_path / "a" / "run" / "last.ckpt")
    assert bytes_in(tmp_path / "a") == before
    assert names_in(tmp_path / "d") == [
        "run/checkpoints/epoch=2.ckpt",
        "run/checkpoints/epoch=3.ckpt",
        "run/last.ckpt",
    ]
    assert keep.best_model_path == str(tmp_path / "d" / "run" / "checkpoints" / "epoch=3.ckpt")


def test_a_copy_continues_with_its_own_files(tmp_path):
    best_of(tmp_path / "a", 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    before = bytes_in(tmp_path / "a")
    keep = best_of(tmp_path / "b", 3, path="last")
    assert bytes_in(tmp_path / "a") == before
    assert names_in(tmp_path / "b") == [
        "run/checkpoints/epoch=1.ckpt",
        "run/checkpoints/epoch=2.ckpt",
        "run/last.ckpt",
    ]
    assert list(keep.best_k_models) == [
        str(tmp_path / "b" / "run" / "checkpoints" / f"epoch={epoch}.ckpt") for epoch in (1, 2)
    ]


@pytest.mark.parametrize("place", ["a", "b"])
def test_a_dirpath_outside_the_runs_folder_is_of_the_run_and_not_of_a_copy(tmp_path, place):
    best_of(tmp_path / "a", 2, dirpath=tmp_path / "out")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    warns = nullcontext() if place == "a" else pytest.warns(UserWarning, match="another folder")
    with warns:
        best_of(tmp_path / place, 3, path="last", dirpath=tmp_path / "out")
    assert names_in(tmp_path / "out") == [
        f"epoch={epoch}.ckpt" for epoch in ((1, 2) if place == "a" else (0, 1, 2))
    ]


def test_one_object_in_two_folders_deletes_no_file_of_the_other_run(tmp_path):
    keep = best_of(tmp_path / "a", 2)
    before = bytes_in(tmp_path / "a")
    best_of(tmp_path / "d", 3, keep=keep)
    assert bytes_in(tmp_path / "a") == before
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    best_of(tmp_path / "b", 3, path="last", keep=keep)
    assert bytes_in(tmp_path / "a") == before
    assert keep.best_model_path == str(tmp_path / "b" / "run" / "checkpoints" / "epoch=2.ckpt")


def rewrite(path, change):
    """Change the state of model_checkpoint in a file."""
    state = torch.load(path, weights_only=True)
    change(state_of_best(state))
    checkpoint_file.write(state, path)


@pytest.mark.parametrize(
    "name", ["/etc/passwd.ckpt", "checkpoints/../../../mine.ckpt", "mine", "..", 3]
)
@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("best_model_path", lambda name: name),
        ("last_model_path", lambda name: name),
        ("best_k_models", lambda name: {name: 1.0}),
        ("replaced", lambda name: [name]),
    ],
)
def test_a_name_that_leads_out_of_the_folder_is_refused(name, where, kept):
    keep = ModelCheckpoint("falls")
    with pytest.raises(ValueError, match="is no name of a checkpoint inside the folder"):
        keep.load_state_dict({**keep.state_dict(), where: kept(name)})


def test_a_checkpoint_that_names_a_file_elsewhere_is_refused(tmp_path):
    best_of(tmp_path, 2)
    rewrite(
        tmp_path / "run" / "last.ckpt",
        lambda state: state["best_k_models"].update({"../../mine.ckpt": 5.0}),
    )
    with pytest.raises(
        TrainingError,
        match=r"last\.ckpt: the state of .*model_checkpoint.* does not fit: '\.\./\.\./mine\.ckpt'",
    ):
        best_of(tmp_path, 3, path="last")


def test_links_out_of_the_folder_and_files_of_others_are_not_followed_and_not_deleted(tmp_path):
    best_of(tmp_path / "other", 1)
    best_of(tmp_path, 2)
    folder, mine = tmp_path / "run" / "checkpoints", tmp_path / "mine"
    mine.mkdir()
    for name in ("a", "b"):
        (mine / f"{name}.ckpt").write_text("mine")
    (folder / "link.ckpt").symlink_to(mine / "a.ckpt")
    (folder / "sub").symlink_to(mine)
    shutil.copy(tmp_path / "other" / "run" / "checkpoints" / "epoch=0.ckpt", folder / "others.ckpt")
    shutil.copy(folder / "epoch=1.ckpt", folder / "copy.ckpt")
    worse = {"link.ckpt": 9.0, "sub/b.ckpt": 8.0, "others.ckpt": 7.0, "gone.ckpt": 6.0}
    rewrite(
        tmp_path / "run" / "last.ckpt",
        lambda state: state.update(best_k_models=worse | state["best_k_models"], replaced=[*worse]),
    )
    with pytest.warns(
        UserWarning,
        match=r"checkpoints no longer has link\.ckpt, sub/b\.ckpt, others\.ckpt, gone\.ckpt of",
    ):
        keep = best_of(tmp_path, 4, path="last")
    assert sorted(path.name for path in mine.iterdir()) == ["a.ckpt", "b.ckpt"]
    assert sorted(path.name for path in folder.iterdir()) == [
        *("copy.ckpt", "epoch=2.ckpt", "epoch=3.ckpt", "link.ckpt", "others.ckpt", "sub"),
    ]
    assert [one[-12:] for one in keep.best_k_models] == ["epoch=2.ckpt", "epoch=3.ckpt"]


def test_a_best_that_was_deleted_is_not_the_best(tmp_path):
    best_of(tmp_path, 2)
    (tmp_path / "run" / "checkpoints" / "epoch=1.ckpt").unlink()
    seen = []

    class Looks(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(
                (
                    trainer.checkpoint_callback.best_model_path[-12:],
                    trainer.checkpoint_callback.best_model_score,
                )
            )

    module, keep = Random(), ModelCheckpoint("falls", save_top_k=2)
    module.validation_step = lambda batch, batch_idx: module.log("falls", 1.0)
    options = {"plugins": [keep], "callbacks": [Looks()], "steps": False}
    with pytest.warns(UserWarning, match=r"no longer has epoch=1\.ckpt of this run"):
        train(tmp_path, epochs=3, path="last", module=module, **options)
    assert seen == [("epoch=0.ckpt", 0.0)]


class _Killed(BaseException):
    pass


class Kills:
    """Stops all changes of files at the n-th moment: after each write and before each deletion."""

    def __init__(self, monkeypatch, moment):
        self.left, self.write, self.delete = moment, checkpoint_file.write, model_checkpoint.delete
        monkeypatch.setattr(checkpoint_file, "write", self.writes)
        monkeypatch.setattr(model_checkpoint, "delete", self.deletes)

    def writes(self, state, path):
        self.write(state, path)
        self.count()

    def deletes(self, folder, name):
        self.count()
        self.delete(folder, name)

    def count(self):
        self.left -= 1
        if not self.left:
            raise _Killed


@pytest.fixture(scope="module")
def whole_best(tmp_path_factory):
    """Fit four epochs without a kill; return the trainer and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return best_of(folder, 4, save_top_k=2, save_last=True), folder


@pytest.mark.parametrize(
    "moment", [2, 9, *(pytest.param(n, marks=pytest.mark.drill) for n in (1, 7, 10, 11))]
)
def test_a_kill_between_two_files_leaves_nothing_after_a_resume(
    tmp_path, monkeypatch, whole_best, moment
):
    options = {"save_top_k": 2, "save_last": True}
    whole, unbroken = whole_best
    with monkeypatch.context() as patched:
        Kills(patched, moment)
        with pytest.raises(_Killed):
            best_of(tmp_path / "killed", 4, **options)
    folder = tmp_path / "killed" / "run" / "checkpoints"
    for name in (".epoch=9.ckpt.12345", "mine.ckpt"):
        (folder / name).write_text("")
    for name in (
        ".last.ckpt.12345",
        ".summary.json.12345",
        ".metrics.csv.12345",
        ".predictions.pt.12345",
    ):
        (folder.parent / name).write_text("")
    rest = best_of(tmp_path / "killed", 4, path="auto", **options)
    assert names_in(tmp_path / "killed") == sorted(
        [*names_in(unbroken), "run/checkpoints/mine.ckpt"]
    )
    assert [one.rpartition("/")[2] for one in rest.best_k_models] == [
        one.rpartition("/")[2] for one in whole.best_k_models
    ]
    last = [
        torch.load(one / "run" / "last.ckpt", weights_only=True)["model"]
        for one in (unbroken, tmp_path / "killed")
    ]
    assert all(torch.equal(value, last[1][name]) for name, value in last[0].items())


def test_a_file_that_the_user_chose_leaves_the_later_ones(tmp_path):
    best_of(tmp_path, 3, save_top_k=-1)
    folder = tmp_path / "run" / "checkpoints"
    chosen = shutil.copy(folder / "epoch=0.ckpt", folder / "last-validated.ckpt")
    best_of(tmp_path, 3, path=chosen, save_top_k=-1)
    assert names_in(folder) == [
        *(f"epoch={name}.ckpt" for name in ("0", "1-v1", "1", "2-v1", "2")),
        "last-validated.ckpt",
    ]


def test_a_metric_of_an_earlier_epoch_is_known(tmp_path):
    class First(Random):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 0:
                self.log("first", 1.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    whole, _ = train(tmp_path / "whole", epochs=2, module=First, steps=False)
    train(tmp_path / "rest", epochs=1, module=First, steps=False)
    rest, _ = train(tmp_path / "rest", epochs=2, path="last", module=First, steps=False)
    assert rest.logged_metrics == whole.logged_metrics
    assert rest.run.logs.prog_bar == whole.run.logs.prog_bar
