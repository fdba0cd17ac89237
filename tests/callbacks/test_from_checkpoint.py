"""``Module.load_from_checkpoint``: a file makes the module that was saved, or says why not."""

import pickle
from argparse import Namespace
from functools import partial

import pytest
import torch
from small_models import assert_equal, fit, loader, trainer
from torch import nn

import geartrain as gt
from geartrain.callbacks import EMA, ModelCheckpoint
from geartrain.testing import ThreadRanks


class Net(gt.Module):
    def __init__(self, hidden, act=nn.Tanh, lr=0.1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, hidden), act(), nn.Linear(hidden, 1))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture
def saved(tmp_path):
    """Return a function that trains a module and returns its file."""

    def save(module, **options):
        fit(module, output=tmp_path / "run", **options)
        return tmp_path / "run" / "last.ckpt"

    return save


def test_hyperparameters_and_weights_come_from_the_file(saved):
    trained = Net(5, lr=0.2)
    loaded = Net.load_from_checkpoint(saved(trained))
    assert loaded.hparams == {"hidden": 5, "lr": 0.2}
    assert_equal(loaded, trained)
    assert next(loaded.parameters()).requires_grad


def test_overrides_replace_the_files_hyperparameters(saved):
    loaded = Net.load_from_checkpoint(str(saved(Net(5))), lr=0.7)
    assert (loaded.lr, loaded.hparams.hidden) == (0.7, 5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_file_of_a_run_makes_the_module(tmp_path, ranks):
    trained, best = Net(4), ModelCheckpoint(monitor="val_loss", save_top_k=-1, filename="{step}")
    strategy = {} if ranks == 1 else {"strategy": ThreadRanks(ranks)}
    fit(trained, val=loader(8), plugins=[best], output=tmp_path, **strategy)
    (kept,) = (tmp_path / "checkpoints").iterdir()
    for file in (tmp_path / "last.ckpt", kept):
        assert_equal(Net.load_from_checkpoint(file), trained)


def test_the_average_of_ema_is_the_model(saved):
    trained = Net(4)
    file = saved(trained, plugins=[EMA(decay=0.5)])
    assert_equal(Net.load_from_checkpoint(file), trained)  # fit leaves the average in it


# --- arguments that are no plain values -----------------------------------------------------------


def test_an_object_must_be_given_again(saved):
    file = saved(Net(5, act=nn.ReLU))
    with pytest.raises(gt.UsageError, match=r"no value for act,.* Fix: Net\.load_.*, act=\.\.\.\)"):
        Net.load_from_checkpoint(file)
    assert isinstance(Net.load_from_checkpoint(file, act=nn.ReLU).layers[1], nn.ReLU)


def test_a_pickled_module_knows_what_it_was_made_with(saved):
    again = pickle.loads(pickle.dumps(Net(5, act=nn.ReLU)))  # as in a rank of ddp_spawn
    file = saved(again)
    with pytest.raises(gt.UsageError, match="no value for act"):
        Net.load_from_checkpoint(file)
    assert Net.load_from_checkpoint(file, act=nn.ReLU).hparams.hidden == 5


def test_what_save_hyperparameters_ignores_is_not_in_the_file(saved):
    class Secret(Net):
        def __init__(self, hidden=3, secret="none"):
            super().__init__(hidden)
            self.save_hyperparameters(ignore="secret")

    state = torch.load(saved(Secret(4, "swordfish")), weights_only=True)
    assert "swordfish" not in str({k: v for k, v in state.items() if k != "model"})
    assert state["hyper_parameters"] == {"hidden": 4}


def test_ignored_arguments_are_asked_for_unless_they_were_the_default(saved, tmp_path):
    class Secret(Net):
        def __init__(self, hidden=3, secret="none"):
            super().__init__(hidden)
            self.save_hyperparameters(ignore="secret")

    file = saved(Secret(4, "swordfish"))
    with pytest.raises(gt.UsageError, match="no value for secret"):
        Secret.load_from_checkpoint(file)
    assert Secret.load_from_checkpoint(file, secret="x").hparams == {"hidden": 4}
    fit(Secret(4), output=tmp_path / "usual")
    assert Secret.load_from_checkpoint(tmp_path / "usual" / "last.ckpt").hparams == {"hidden": 4}


@pytest.mark.parametrize("kind", [dict, Namespace])
def test_a_config_is_given_as_it_was(saved, kind):
    class Configured(Net):
        def __init__(self, config, deep=1):
            super().__init__(vars(config)["hidden"] if kind is Namespace else config["hidden"])
            self.save_hyperparameters(config)

    loaded = Configured.load_from_checkpoint(saved(Configured(kind(hidden=6, name="a"), deep=2)))
    assert loaded.hparams == {"hidden": 6, "name": "a"}
    assert loaded.layers[0].out_features == 6


def test_positional_and_other_arguments_are_given_as_they_were(saved):
    class Many(Net):
        def __init__(self, *sizes, **more):
            super().__init__(sizes[1])
            self.sizes, self.more = sizes, more

    loaded = Many.load_from_checkpoint(saved(Many(2, 7, depth=3)), width=4)
    assert (loaded.sizes, loaded.more) == ((2, 7), {"depth": 3, "width": 4})


def test_values_that_a_parent_got_are_no_arguments_of_the_heir(saved):
    class Heir(Net):
        def __init__(self, depth=2, **options):
            super().__init__(hidden=depth, **options)

    loaded = Heir.load_from_checkpoint(saved(Heir(3, lr=0.3)))
    assert (loaded.layers[0].out_features, loaded.lr) == (3, 0.3)


def test_values_that_the_module_saved_itself_are_read(saved):
    class Labelled(Net):
        labels = ()

        def on_save_checkpoint(self, checkpoint):
            checkpoint["labels"] = ["cat"]

        def on_load_checkpoint(self, checkpoint):
            self.labels = checkpoint["labels"]

    assert Labelled.load_from_checkpoint(saved(Labelled(2))).labels == ["cat"]


# --- errors ---------------------------------------------------------------------------------------


class Other(Net):
    def __init__(self, hidden):
        super().__init__(hidden)
        self.head = self.layers
        del self.layers


def test_a_wrong_class_is_named_with_the_weights_that_differ(saved):
    file = saved(Net(3))
    with pytest.raises(gt.UsageError) as caught:
        Other.load_from_checkpoint(file)
    message = str(caught.value)
    assert f"{file}, of Net, does not fit Other: missing in the file: head.0.weight" in message
    assert "only in the file: layers.0.weight" in message
    assert "Fix: " in message


@pytest.mark.parametrize(
    ("map_location", "device"),
    [
        (None, "cpu"),
        ("meta", "meta"),
        (torch.device("cpu"), "cpu"),
        ({"cuda:1": "cuda:0"}, "cpu"),
        ({"cpu": "meta"}, "meta"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: None, "cpu"),
    ],
)
def test_map_location_is_the_modules_device(saved, map_location, device):
    loaded = Net.load_from_checkpoint(saved(Net(3)), map_location=map_location)
    assert {parameter.device.type for parameter in loaded.parameters()} == {device}


def test_an_instance_does_not_load_another(saved):
    path, module = saved(Net(3)), Net(3)
    with pytest.raises(AttributeError, match=r"a new module\. Fix: call it on the class"):
        module.load_from_checkpoint(path)
    assert not hasattr(module, "load_from_checkpoint")


def test_another_shape_is_named_with_both(saved):
    with pytest.raises(gt.UsageError, match=r"layers\.0\.weight \[3, 3\], here \[4, 3\]"):
        Net.load_from_checkpoint(saved(Net(3)), hidden=4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"hiden": 4}, "no argument 'hiden'. Did you mean 'hidden'?"),
        ({"weights_only": True}, "no argument 'weights_only'. Fix: leave it out"),
    ],
)
def test_an_unknown_override_is_refused(saved, override, message):
    with pytest.raises(gt.UsageError) as caught:
        Net.load_from_checkpoint(saved(Net(3)), **override)
    assert message in str(caught.value)


def test_a_file_without_hyperparameters_says_which_are_needed(tmp_path):
    torch.save({"model": Net(3).state_dict()}, tmp_path / "weights.ckpt")
    with pytest.raises(gt.UsageError, match=r"it has no hyperparameters\. Fix: .*, hidden=\.\.\."):
        Net.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert Net.load_from_checkpoint(tmp_path / "weights.ckpt", hidden=3).hparams.hidden == 3


def test_a_file_of_lightning_is_read(tmp_path):
    trained = Net(3)
    state = {"state_dict": trained.state_dict(), "hyper_parameters": {"hidden": 3, "lr": 0.5}}
    torch.save({**state, "hparams_name": "kwargs", "epoch": 1}, tmp_path / "lightning.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "lightning.ckpt")
    assert_equal(loaded, trained)
    assert loaded.lr == 0.5


def test_no_file_no_checkpoint_and_damage_are_errors(saved, tmp_path):
    with pytest.raises(gt.UsageError, match="there is no checkpoint"):
        Net.load_from_checkpoint(tmp_path / "none.ckpt")
    torch.save(Net(3).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(gt.TrainingError, match=r"has no 'model'\. Fix: "):
        Net.load_from_checkpoint(tmp_path / "weights.pt")
    file = saved(Net(3))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    with pytest.raises(gt.TrainingError, match="is damaged"):
        Net.load_from_checkpoint(file)


def test_nothing_in_a_file_is_run(tmp_path):
    torch.save({"model": {}, "hyper_parameters": {"act": partial(print)}}, tmp_path / "bad.ckpt")
    with pytest.raises(gt.TrainingError, match="could not be read as a checkpoint"):
        Net.load_from_checkpoint(tmp_path / "bad.ckpt")


# --- the weights that fit -------------------------------------------------------------------------


def test_not_strict_loads_what_fits_and_prints_the_rest(saved, capsys):
    class Wider(Net):
        def __init__(self, hidden, act=nn.Tanh, lr=0.1):
            super().__init__(hidden, act, lr)
            self.layers[2] = nn.Linear(hidden, 2)
            self.new = nn.Linear(1, 1)

    trained = Net(3)
    loaded = Wider.load_from_checkpoint(saved(trained), strict=False)
    assert torch.equal(loaded.layers[0].weight, trained.layers[0].weight)
    assert loaded.layers[2].weight.shape == (2, 3)
    lines = capsys.readouterr().err.splitlines()
    start = next(i for i, line in enumerate(lines) if "loaded 2 of 6 weights" in line)
    assert lines[start + 1] == "  missing in the file, left as they were: new.weight, new.bias"
    assert lines[start + 2] == (
        "  of another shape, left as they were: layers.2.weight [1, 3], here [2, 3], "
        "layers.2.bias [1], here [2]"
    )


def test_a_prefix_before_every_name_is_an_error_that_names_it(tmp_path):
    weights = {f"model.{name}": value for name, value in Net(3).state_dict().items()}
    torch.save({"model": weights}, tmp_path / "prefixed.ckpt")
    with pytest.raises(gt.UsageError, match=r"no weight that fits Net: .*differ by 'model\.'"):
        Net.load_from_checkpoint(tmp_path / "prefixed.ckpt", hidden=3, strict=False)


def test_a_resume_of_the_loaded_module_continues_the_run(saved, tmp_path):
    file = saved(Net(3))
    loaded, whole = Net.load_from_checkpoint(file), Net.load_from_checkpoint(file)
    runner = trainer(max_epochs=2, output=tmp_path / "run")
    runner.fit(loaded, loader(), ckpt_path=file)
    trainer(max_epochs=1).fit(whole, loader())
    assert runner.current_epoch == 2
    assert_equal(loaded, whole)
