"""EMA: an exponential moving average of the weights."""

import pytest
import torch
from small_models import EvalNet, Net, assert_equal, differ, fit, loader, trainer, weights
from torch import nn

from geartrain import UsageError, hookimpl
from geartrain.callbacks import (
    EMA,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)


class Follows:
    """Record the weights after each step, and compute the average by hand."""

    def __init__(self):
        self.weights = []

    @hookimpl
    def on_run_start(self, run):
        self.first = weights(run.module)

    @hookimpl
    def on_step_end(self, run):
        self.weights.append(weights(run.module))

    def average(self, decay, steps=None, first=None):
        found = {name: t.double() for name, t in (self.first if first is None else first).items()}
        for now in self.weights if steps is None else [self.weights[i - 1] for i in steps]:
            found = {
                name: decay * t + (1 - decay) * now[name].double() for name, t in found.items()
            }
        return found


def close(a, b, tolerance=1e-6):
    assert a.keys() == b.keys()
    for name in a:
        both = a[name].double(), b[name].double()
        torch.testing.assert_close(*both, rtol=tolerance, atol=tolerance, msg=name)


class Norm(EvalNet):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def averaged(ema, module=None, **options):
    module, follows = Net() if module is None else module, Follows()
    one = fit(module, plugins=[follows, ema], **{"max_epochs": 2, **options})
    return module, follows, one


def test_the_module_holds_the_average_at_the_end():
    module, follows, _ = averaged(EMA(0.9))
    close(module.state_dict(), follows.average(0.9))
    assert differ(module, follows.weights[-1])


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 9, 12]), (5, [5, 10])])
def test_every(every, steps):
    ema = EMA(0.8, every=every)
    module, follows, _ = averaged(ema)
    close(module.state_dict(), follows.average(0.8, steps))
    assert ema.updates == len(steps)


def test_it_begins_at_start_step_with_the_weights_as_they_are():
    module, follows, _ = averaged(EMA(0.8, start_step=5))
    close(module.state_dict(), follows.average(0.8, range(6, 13), follows.weights[4]))


def test_floating_buffers_are_averaged_and_the_others_are_not():
    module, follows, _ = averaged(EMA(0.9), Norm())
    expected = follows.average(0.9)
    counted = "layers.1.num_batches_tracked"
    expected[counted] = follows.weights[-1][counted]
    close(module.state_dict(), expected)


class Watches:
    """Record the weights that are validated."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def forward(self, run, method):
        if method == "validation_step":
            self.seen.append((run.stage, weights(run.module)))
        return (yield)


@pytest.mark.parametrize("validate", [True, False])
def test_validation_uses_the_average_and_training_continues_with_the_weights(validate):
    torch.manual_seed(3)
    plain, before = EvalNet(), Follows()
    fit(plain, plugins=[before], max_epochs=2)
    torch.manual_seed(3)
    watches = Watches()
    ema, module, follows = EMA(0.9, validate=validate), EvalNet(), Follows()
    plugins = [watches, follows, ema]
    fit(module, val=loader(4), plugins=plugins, max_epochs=2, num_sanity_val_steps=1)
    assert_equal(before.weights[-1], follows.weights[-1])  # EMA does not change the training
    (stage, sanity), (_, first), (_, second) = watches.seen
    assert stage == "sanity_check"
    assert_equal(sanity, follows.first)
    if validate:
        close(first, follows.average(0.9, range(1, 7)))
        close(second, follows.average(0.9))
    else:
        assert_equal(first, follows.weights[5])


class Tied(EvalNet):
    """A module with one weight under two names."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 1)
        )
        self.layers[2].weight = self.layers[0].weight


ENTRIES = {"geartrain", "step", "epoch", "plan", "model", "module", "hyper_parameters", "fit"}


@pytest.mark.parametrize("validate", [True, False])
def test_a_checkpoint_has_the_validated_weights_and_the_others_beside_them(tmp_path, validate):
    follows, module, ema = Follows(), Tied(), EMA(0.9, validate=validate)
    best = ModelCheckpoint(save_last=True)
    trainer(plugins=[best, follows, ema], output=tmp_path / "run").fit(module, loader(), loader(8))
    average, trained = weights(module), follows.weights[-1]
    assert differ(module, trained)
    for path in (tmp_path / "run" / "last.ckpt", best.best_model_path, best.last_model_path):
        state = torch.load(path, weights_only=True)
        other = "trained" if validate else "average"
        assert set(state) == {*ENTRIES, other}
        assert_equal(state["model"], average if validate else trained)
        assert_equal(state[other], trained if validate else average)


def test_before_the_first_update_a_checkpoint_is_as_without(tmp_path):
    follows, module = Follows(), EvalNet()
    fit(module, val=loader(4), plugins=[follows, EMA(0.9, start_step=100)], output=tmp_path / "run")
    state = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert set(state) == ENTRIES
    assert_equal(state["model"], follows.weights[-1])
    assert_equal(module, follows.weights[-1])


def matrices(model):
    return {"own": torch.ones(1), **{n: t for n, t in model.items() if not n.endswith("bias")}}


def halved(model):
    return {name: t.half() for name, t in model.items()}


def renamed(model):
    return {f"old_{name}": t for name, t in model.items()}


AVERAGES = [
    lambda: EMA(0.9),
    lambda: EMA(0.9, validate=False),
    lambda: EMAWeightAveraging(decay=0.8),
    lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2),
]


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("change", [matrices, halved, renamed])
def test_changes_of_the_modules_on_save_checkpoint_stay(tmp_path, change, own, average):
    class Changes(EvalNet):
        def on_save_checkpoint(self, checkpoint):
            # ``own``: as the functions of libraries that save adapters alone
            checkpoint["model"] = change(self.state_dict() if own else checkpoint["model"])
            checkpoint["labels"] = ["cat"]

    module, follows = Changes(), Follows()
    fit(module, val=loader(4), plugins=[average(), follows], output=tmp_path / "run")
    state = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert state["labels"] == ["cat"]
    validated = "average" not in state
    assert_equal(state["model" if validated else "average"], change(weights(module)))
    assert_equal(state["trained" if validated else "model"], change(follows.weights[-1]))


@pytest.mark.parametrize("average", AVERAGES)
def test_a_run_with_other_names_in_its_file_resumes(tmp_path, average):
    class Renames(EvalNet):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["model"] = renamed(checkpoint["model"])

        def on_load_checkpoint(self, checkpoint):
            items = checkpoint["model"].items()
            checkpoint["model"] = {name.removeprefix("old_"): t for name, t in items}

    whole, part = Renames(), Renames()
    part.load_state_dict(whole.state_dict())
    fit(whole, plugins=[average()], max_epochs=2)
    for epochs in (1, 2):
        one = trainer(plugins=[average()], max_epochs=epochs, output=tmp_path / "run")
        one.fit(part, loader(), ckpt_path="auto")
    assert_equal(part, whole)
    loaded = Renames()
    one.test(loaded, loader(), ckpt_path=tmp_path / "run" / "last.ckpt")
    validated = average().validate
    assert differ(loaded, weights(whole)) != validated


class SavesWithin:
    """A plugin that saves while the average is in the module."""

    @hookimpl
    def on_validation_start(self, run):
        if run.stage == "validate":
            run.save_checkpoint(run.checkpoint(run.epoch), run.output / "within.ckpt")


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_from_within_a_validation_has_both_too(tmp_path, first):
    follows, module, watches = Follows(), EvalNet(), Watches()
    plugins = [EMA(0.9), SavesWithin()] if first else [SavesWithin(), EMA(0.9)]
    fit(module, val=loader(4), plugins=[follows, watches, *plugins], output=tmp_path / "run")
    state = torch.load(tmp_path / "run" / "within.ckpt", weights_only=True)
    assert_equal(state["trained"], follows.weights[-1])
    assert_equal(state["model"], module)
    assert_equal(watches.seen[-1][1], module)


class Bumpy(Tied):
    """A module that gets better and worse; its state has an entry that is not a tensor."""

    def get_extra_state(self):
        return "extra"

    def set_extra_state(self, state):
        assert state == "extra"

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch), sync_dist=True)


@pytest.mark.parametrize(
    ("ema", "options"),
    [
        ([], {}),
        ([EMA(0.5)], {"val_check_interval": 2}),
        ([EMA(0.5)], {"precision": "bf16-true", "max_epochs": 4}),
        ([EMA(0.5, validate=False)], {"val_check_interval": 2}),
    ],
)
def test_the_best_is_tested_with_exactly_the_metric_that_made_it_the_best(tmp_path, ema, options):
    torch.manual_seed(2)
    best = ModelCheckpoint(monitor="val", save_top_k=-1)
    one = trainer(plugins=[best, *ema], output=tmp_path / "run", **{"max_epochs": 2, **options})
    one.fit(Bumpy(), loader(24, 4), loader(12, 5))
    assert len(set(best.best_k_models.values())) > 1
    for path, score in best.best_k_models.items():
        assert one.test(dataloaders=loader(12, 5), ckpt_path=path) == [{"test": score}]
    best_result = one.test(dataloaders=loader(12, 5), ckpt_path="best")
    assert best_result == [{"test": best.best_model_score}]


def test_after_fit_the_module_and_the_last_checkpoint_hold_the_average(tmp_path):
    watches, module = Watches(), EvalNet()
    one = trainer(plugins=[watches, EMA(0.9)], output=tmp_path / "run")
    one.fit(module, loader())
    average = weights(module)
    one.validate(module, loader(4))
    assert_equal(watches.seen[0][1], average)
    assert_equal(module, average)
    one.validate(EvalNet(), loader(4), ckpt_path=tmp_path / "run" / "last.ckpt")
    assert_equal(watches.seen[1][1], average)


def test_a_validation_that_fails_leaves_the_trained_weights():
    class Fails(EvalNet):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

    follows, module = Follows(), Fails()
    with pytest.raises(ZeroDivisionError):
        fit(module, val=loader(), plugins=[follows, EMA(0.9)])
    assert_equal(module, follows.weights[-1])


def test_bf16_weights_are_averaged_in_float32():
    """With a decay of 0.999, an average in bfloat16 would not change at all."""
    ema = EMA(0.999)
    module, follows, _ = averaged(ema, Net(), precision="bf16-true")
    average = ema.state_dict()["average"]
    assert {t.dtype for t in average.values()} == {torch.float32}
    close(average, follows.average(0.999), 1e-5)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_the_next_fit_starts_from_scratch():
    ema = EMA(0.9)
    averaged(ema)
    module, follows, _ = averaged(ema, Net())
    close(module.state_dict(), follows.average(0.9))


def test_a_state_of_another_module_is_refused(tmp_path):
    module, other = Net(), Net()
    module.register_buffer("only", torch.ones(2), persistent=False)
    fit(module, plugins=[EMA(0.9)], output=tmp_path)
    again = trainer(plugins=[EMA(0.9)], output=tmp_path, max_epochs=2)
    message = r"geartrain-callbacks\[ema\]: its state is of another module"
    with pytest.raises(UsageError, match=message):
        again.fit(other, loader(), ckpt_path="last")


class SavesInTheLoop(Net):
    """Saves a checkpoint after the third batch, before the step is counted."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (0, 2) and self.file is not None:
            self.trainer.save_checkpoint(self.file)


@pytest.mark.parametrize(
    "averaging",
    [
        lambda: EMA(0.8),
        lambda: EMAWeightAveraging(decay=0.8),
        lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2),
    ],
)
def test_a_save_after_a_batch_has_the_average_of_its_step(tmp_path, averaging):
    quiet, saving, resumed = SavesInTheLoop(), SavesInTheLoop(), SavesInTheLoop()
    resumed.load_state_dict(quiet.state_dict())
    saving.load_state_dict(quiet.state_dict())
    quiet.file, resumed.file, saving.file = None, None, tmp_path / "third.ckpt"
    averages = []
    for module, path in ((quiet, None), (saving, None), (resumed, saving.file)):
        one = trainer(max_epochs=2, callbacks=[averaging()])
        one.fit(module, loader(), ckpt_path=path)
        averages.append(module.state_dict())
    assert_equal(averages[1], averages[0])
    assert_equal(averages[2], averages[0])
