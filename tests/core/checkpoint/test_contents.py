"""What a checkpoint holds: it can be read again, and the module's hooks change it."""

import warnings
from collections import Counter

import pytest
import torch
from small_models import Net, fit, loader, trainer
from torch import nn

import geartrain as gt
from geartrain import TrainingError
from geartrain.callbacks import (
    EMA,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

# --- what no run could read -----------------------------------------------------------------------


class Adds(Net):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def on_save_checkpoint(self, checkpoint):
        checkpoint["added"] = self.value

    def on_load_checkpoint(self, checkpoint):
        self.value = checkpoint["added"]


class Extra(Net):
    def get_extra_state(self):
        return nn.MSELoss()

    def set_extra_state(self, state): ...


class Rates(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["rate_of"] = abs


class Marked(torch.Tensor):
    """A subclass, as those of torchvision's images: torch's safe loader refuses its class."""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: Adds(nn.MSELoss()), r"torch\.nn\.modules\.loss\.MSELoss under 'added'"),
        (lambda: Adds({"deep": [len]}), "builtin_function_or_method under 'added'"),
        (lambda: Adds(torch.ones(1).as_subclass(Marked)), "Marked under 'added'"),
        (Extra, "MSELoss under 'model'"),
        (lambda: Net(Rates), "builtin_function_or_method under 'fit'"),
    ],
)
def test_what_no_run_could_read_is_refused_when_it_is_written(tmp_path, module, words):
    with pytest.raises(
        TrainingError, match=f"checkpoint with .*{words} could not be read again.*Fix"
    ):
        fit(module(), output=tmp_path)
    assert not (tmp_path / "last.ckpt").exists()


class Setting:
    """A class that the program lets torch's safe loader make."""

    def __init__(self):
        self.value = 3


@pytest.mark.parametrize("value", [torch.float64, bytearray(b"a"), Counter("aab")])
def test_what_can_be_read_is_read(tmp_path, value):
    fit(Adds(value), output=tmp_path)
    other = Adds(None)
    trainer(output=tmp_path, max_epochs=2).fit(other, loader(), ckpt_path="last")
    assert other.value == value


def test_a_class_that_the_program_lets_torch_read(tmp_path):
    with torch.serialization.safe_globals([Setting]):
        fit(Adds(Setting()), output=tmp_path)
        other = Adds(None)
        trainer(output=tmp_path, max_epochs=2).fit(other, loader(), ckpt_path="last")
    assert other.value.value == 3


# --- parameters without a name --------------------------------------------------------------------


class Replaces(Net):
    def on_train_epoch_end(self):
        self.layers[0].weight = nn.Parameter(self.layers[0].weight.detach().clone())


class Outside(Net):
    def configure_optimizers(self):
        self.hidden = [nn.Parameter(torch.ones(1))]  # a list registers nothing
        return torch.optim.Adam([*self.parameters(), *self.hidden])


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Replaces, "parameter 0 of SGD, which Replaces does not have. Fix"),
        (Outside, "parameter 4 of Adam, which Outside does not have. Fix"),
    ],
)
def test_parameters_that_the_module_does_not_have_are_refused_at_once(tmp_path, module, words):
    with pytest.raises(TrainingError, match=f"no checkpoint could restore {words}"):
        fit(module(), output=tmp_path)
    assert not (tmp_path / "last.ckpt").exists()
    fit(module())  # without a checkpoint they may be trained
    weights = ModelCheckpoint(dirpath=tmp_path, filename="a", save_weights_only=True)
    fit(module(), plugins=[weights])
    assert (tmp_path / "a.ckpt").exists()


# --- on_load_checkpoint ---------------------------------------------------------------------------


class Old(gt.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net, self.head = nn.Linear(3, 2), nn.Linear(2, 1)
        self.register_buffer("mean", torch.tensor(1.0))

    def training_step(self, batch, batch_idx):
        return (self.head(self.net(batch[0])) - self.mean).pow(2).mean()

    def test_step(self, batch, batch_idx):
        self.log("mean", self.mean)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class New(Old):
    """Has another mean and another name for a layer, and one more buffer."""

    def __init__(self):
        super().__init__()
        self.body = self.net
        del self.net
        self.register_buffer("scale", torch.tensor(2.0))

    def training_step(self, batch, batch_idx):
        return (self.head(self.body(batch[0])) * self.scale - self.mean).pow(2).mean()

    def on_load_checkpoint(self, checkpoint):
        weights = checkpoint["model"]
        for name in [name for name in weights if name.startswith("net.")]:
            weights[name.replace("net.", "body.")] = weights.pop(name)
        weights["mean"] = torch.tensor(3.0)
        weights["scale"] = torch.tensor(4.0)
        self.loaded = {name: weight.clone() for name, weight in weights.items()}

    def configure_optimizers(self):  # in the order of the old module
        return torch.optim.Adam([*self.body.parameters(), *self.head.parameters()], lr=0.05)

    def on_train_start(self):
        self.at_start = {name: weight.clone() for name, weight in self.state_dict().items()}


AVERAGES = {
    "none": list,
    "ema": lambda: [EMA(decay=0.5)],
    "ema of trained weights": lambda: [EMA(decay=0.5, validate=False)],
    "weight_averaging": lambda: [EMAWeightAveraging(decay=0.5)],
    "swa": lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)],
}


@pytest.mark.parametrize("plugins", AVERAGES)
def test_on_load_checkpoint_changes_what_is_loaded(tmp_path, plugins):
    plugins = AVERAGES[plugins]
    fit(Old(), output=tmp_path, plugins=plugins())
    file = torch.load(tmp_path / "last.ckpt", weights_only=True)
    module, average = New(), plugins()
    started = {}

    class Sees:
        @gt.hookimpl
        def on_epoch_start(self):
            started.update(average[0].state_dict()["average"] if average else {})

    trainer(output=tmp_path, max_epochs=2, plugins=[*average, Sees()]).fit(
        module, loader(), ckpt_path="last"
    )
    trained = file.get("trained", file["model"])
    assert torch.equal(module.at_start["body.weight"], trained["net.weight"])
    assert (module.at_start["mean"], module.at_start["scale"]) == (3.0, 4.0)
    assert module.at_start.keys() == module.loaded.keys()
    if average:
        averaged = file["average"] if "average" in file else file["model"]
        assert torch.equal(started["body.weight"], averaged["net.weight"])
        assert (started["mean"], started["scale"]) == (3.0, 4.0)
        assert (module.mean, module.scale) == (3.0, 4.0)


def test_on_load_checkpoint_changes_what_is_tested_and_loaded(tmp_path):
    fit(Old(), output=tmp_path)
    module = New()
    (tested,) = trainer().test(module, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert tested["mean"] == 3.0
    again = New.load_from_checkpoint(tmp_path / "last.ckpt")
    assert (again.mean, again.scale) == (3.0, 4.0)
    assert torch.equal(again.body.weight, module.body.weight)


# --- parts that the user compiled -----------------------------------------------------------------


class Compiled(Net):
    def __init__(self, compiled=False):
        torch.manual_seed(0)
        super().__init__(torch.optim.Adam)
        self.layers.register_buffer("seen", torch.zeros(2), persistent=False)
        if compiled:
            self.layers = torch.compile(self.layers, backend="eager")

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("plugins", [list, lambda: [EMA(decay=0.5)]])
def test_a_compiled_part_is_no_obstacle(tmp_path, compiled, plugins):
    whole = fit(Compiled(), max_epochs=2, plugins=plugins(), seed=1).run.module
    fit(Compiled(compiled), output=tmp_path, plugins=plugins(), seed=1)
    last = tmp_path / "last.ckpt"
    (tested,) = trainer().test(Compiled(not compiled), loader(), ckpt_path=last)
    assert tested["loss"] > 0
    made = Compiled.load_from_checkpoint(last, compiled=not compiled)
    loose = Compiled.load_from_checkpoint(last, compiled=not compiled, strict=False)
    assert all(map(torch.equal, made.parameters(), loose.parameters()))
    rest = Compiled(not compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(output=tmp_path, max_epochs=2, plugins=plugins(), seed=1).fit(
            rest, loader(), ckpt_path="last"
        )
    for resumed, parameter in zip(rest.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(resumed, parameter)


class Renamed(Compiled):
    """Has the layers of ``Compiled`` under another name."""

    def __init__(self, compiled=False):
        super().__init__(compiled)
        self.body = self.layers
        del self.layers

    def forward(self, x):
        return self.body(x)

    def on_load_checkpoint(self, checkpoint):
        weights = checkpoint["model"]
        checkpoint["model"] = {n.replace("layers.", "body."): w for n, w in weights.items()}


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_that_the_module_renames_may_be_of_a_compiled_part(tmp_path, compiled):
    whole = fit(Compiled(), max_epochs=2, seed=1).run.module
    fit(Compiled(compiled), output=tmp_path, seed=1)
    rest = Renamed(not compiled)
    trainer(output=tmp_path, max_epochs=2, seed=1).fit(rest, loader(), ckpt_path="last")
    for resumed, parameter in zip(rest.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(resumed, parameter)


def test_weights_that_fit_a_compiled_part(tmp_path, capsys):
    fit(Compiled(), output=tmp_path)
    tuned = Compiled(compiled=True)
    options = {"plugins": ["partial_weights"], "max_steps": 1, "limit_train_batches": 1}
    trainer(**options).fit(tuned, loader(), checkpoint=tmp_path / "last.ckpt")
    assert "loaded 4 of 4 weights" in capsys.readouterr().err
