"""The sharded strategies train as ddp does, and say what they cannot do."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from regression import SAVES, Net, one_trainer, samples
from several_ranks import failed, kept_by, results
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.callbacks import ModelCheckpoint

from .cases import CASES, IN_UNITS, OTHERS, STRATEGIES, UNITS, Manual, train

pytestmark = pytest.mark.timeout(120)


#: Without the cases that the kit has for these strategies.
FEWER = [name for name in CASES if name not in ("accumulating", "clipped", "two optimizers")]


def train_all(strategies, names):
    """Return losses, metrics and weights of cases, under ddp and sharded strategies."""
    ways = {"ddp": ("ddp", None), **strategies}
    return {way: {name: train(name, *given) for name in names} for way, given in ways.items()}


two_ranks = kept_by(train_all, STRATEGIES, FEWER, seconds=110)
in_other_ways = kept_by(train_all, OTHERS, list(CASES), seconds=110)


@pytest.mark.parametrize("name", FEWER)
@pytest.mark.parametrize("way", STRATEGIES)
def test_it_trains_as_ddp_does(two_ranks, way, name):
    assert_as_ddp(two_ranks[0], way, name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", OTHERS)
def test_it_trains_as_ddp_does_in_another_way(in_other_ways, way, name):
    assert_as_ddp(in_other_ways[0], way, name)


def assert_as_ddp(found, way, name):
    curve, metrics, weights = found[way][name]
    expected_curve, expected_metrics, expected = found["ddp"][name]
    # In 16 bits sums of another order differ in the third digit.
    rel = 2e-2 if name in ("16-mixed", "bf16-mixed") else 1e-5
    assert len(curve) > 1
    assert curve == pytest.approx(expected_curve, rel=rel)
    assert metrics == pytest.approx(expected_metrics, rel=rel)
    assert list(weights) == list(expected)
    for key, value in weights.items():
        assert type(value) is torch.Tensor
        torch.testing.assert_close(value, expected[key], rtol=rel, atol=rel)


def test_manual_optimisation_trains_units_as_ddp_does(tmp_path):
    found = results(tmp_path, train_all, {"fsdp": ("fsdp", UNITS)}, list(IN_UNITS))[0]
    for name in IN_UNITS:
        assert_as_ddp(found, "fsdp", name)


def test_after_a_run_other_ranks_have_no_weights(two_ranks):
    weights = two_ranks[1]["fsdp"]["adam"][2]
    assert all(value.isnan().all() for value in weights.values())


# --- checkpoints ----------------------------------------------------------------------------------


class Keeps(Net):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["kept"] = [self.first.weight]


def save(strategy, options):
    """Train the first epoch in the folder "run"."""
    trainer = one_trainer(strategy=strategy, strategy_options=options, devices=2, output="run")
    trainer.fit(Keeps(optimizer="adam", shared=True), DataLoader(samples(), 6))


def go_on(strategy, options, folder="run"):
    """Train the second epoch, on two ranks."""
    module = Net(optimizer="adam", shared=True)
    trainer = one_trainer(
        strategy=strategy, strategy_options=options, devices=2, output=folder, max_epochs=2
    )
    trainer.fit(module, DataLoader(samples(), 6), ckpt_path=Path(folder, "last.ckpt"))
    return dict(module.state_dict())


def go_on_alone(folder):
    module = Net(optimizer="adam", shared=True)
    trainer = one_trainer(output=folder / "run", max_epochs=2)
    trainer.fit(module, DataLoader(samples(), 12), ckpt_path=folder / "run" / "last.ckpt")
    return dict(module.state_dict())


@pytest.fixture(scope="module")
def whole():
    """The weights after two epochs of one process."""
    module = Net(optimizer="adam", shared=True)
    one_trainer(max_epochs=2).fit(module, DataLoader(samples(), 12))
    return dict(module.state_dict())


def assert_equal(found, expected):
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """A folder with the run of a strategy."""
    made = tmp_path_factory.mktemp("saves")
    results(made, save, request.param, UNITS if request.param == "fsdp" else None)
    return made


@pytest.mark.parametrize("saved", ["fsdp"], indirect=True)
def test_one_process_resumes_from_a_checkpoint_of_two_ranks(tmp_path, saved, whole):
    checkpoint = torch.load(saved / "run" / "last.ckpt", weights_only=True)
    assert {type(value) for value in checkpoint["model"].values()} == {torch.Tensor}
    assert torch.equal(checkpoint["kept"][0], checkpoint["model"]["first.weight"])
    shutil.copytree(saved / "run", tmp_path / "run")
    assert_equal(go_on_alone(tmp_path), whole)


@pytest.mark.parametrize(
    ("saved", "resuming"),
    [("fsdp", "ddp"), ("fsdp", "fsdp"), ("ddp", "fsdp"), ("ddp_sharded", "fsdp")],
    indirect=["saved"],
)
def test_another_strategy_resumes(tmp_path, saved, whole, resuming):
    shutil.copytree(saved / "run", tmp_path / "run")
    options = UNITS if resuming == "fsdp" else None
    assert_equal(results(tmp_path, go_on, resuming, options)[0], whole)


def save_average(resume):
    """Train an epoch, or two of which the second resumes, with an average."""
    for epochs in [1, 2] if resume else [2]:
        path = Path("run", "last.ckpt") if epochs == 2 and resume else None
        module, average = Net(), gt.callbacks.EMA(0.5)
        trainer = one_trainer(
            strategy="fsdp",
            strategy_options=UNITS,
            devices=2,
            output="run",
            max_epochs=epochs,
            callbacks=[average, ModelCheckpoint(dirpath="best", filename=f"{epochs}")],
        )
        trainer.fit(
            module, DataLoader(samples(), 6), ckpt_path=path if epochs == 2 and resume else None
        )
    return dict(module.state_dict())


def test_a_resumed_average_is_that_of_a_whole_run(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    expected = results(tmp_path / "whole", save_average, False)[0]
    assert_equal(results(tmp_path / "resumed", save_average, True)[0], expected)
    files = [torch.load(tmp_path / name / "best" / "2.ckpt") for name in ("whole", "resumed")]
    assert_equal(files[1]["model"], files[0]["model"])
    assert_equal(files[1]["trained"], files[0]["trained"])


# --- a module on the meta device ------------------------------------------------------------------


class Positions(nn.Module):
    """Has a buffer, which is in no checkpoint."""

    def __init__(self, sets=True):
        super().__init__()
        self.sets = sets
        self.register_buffer("positions", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        if self.sets:
            torch.arange(8.0, out=self.positions)

    def forward(self, x):
        return x + 0.01 * self.positions


class Large(Net):
    def __init__(self, sets=True):
        super().__init__(shared=True, norm=True)
        self.norm = nn.Sequential(self.norm, Positions(sets))


def make_on_meta(sets=True):
    with torch.device("meta"):
        module = Large(sets)
    trainer = one_trainer(strategy="fsdp", strategy_options=UNITS, devices=2, seed=1)
    trainer.fit(module, DataLoader(samples(), 6))
    assert module.extra.weight is module.second.weight
    return dict(module.state_dict()), module.norm[1].positions


def test_a_module_on_the_meta_device_gets_its_weights_from_reset_parameters(tmp_path):
    weights, positions = results(tmp_path, make_on_meta)[0]
    assert positions.tolist() == list(range(8))
    assert all(value.isfinite().all() for value in weights.values())
    assert weights["first.weight"].std() > 0.1
    assert weights["norm.0.running_var"].tolist() != [0.0] * 8


def test_a_tensor_that_reset_parameters_leaves_unset_is_an_error(tmp_path):
    for rank in failed(tmp_path, make_on_meta, False):
        assert "Positions.reset_parameters() does not set positions" in rank.error


# --- refusals -------------------------------------------------------------------------------------


class Skips(Net):
    """Rank 1 leaves out a layer; another one of equal size is run twice."""

    def __init__(self, runs):
        super().__init__()
        self.runs = runs

    def forward(self, x, extra=True):
        hidden = torch.tanh(self.first(x))
        if self.runs == "others":
            layers = [[self.second, self.extra], [self.extra, self.second]][self.global_rank]
            return self.last(layers[1](layers[0](hidden)))
        return self.last(self.second(hidden))


class Logs(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("norm", self.first.weight.norm())


class Reads(Net):
    def forward(self, x, extra=True):
        return super().forward(x) + nn.functional.linear(x, self.first.weight).sum()


class Penalty(Net):
    """Trains with a gradient of gradients, of which ``fully_shard`` would lose a part."""

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + super().training_step(batch, batch_idx)


class SavesWithin(Net):
    """Saves a checkpoint in a step in which no parameter is in a unit."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.trainer.save_checkpoint("within.ckpt")
        return loss


class ChangesAlone(Net):
    """Rank 1 alone changes its part of a weight."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            with torch.no_grad():
                self.first.weight.mul_(1.01)


class ChangesInUnit(Net):
    """Changes a weight in the forward of its unit, after which the ranks drop the whole weight."""

    def __init__(self):
        super().__init__()
        self.extra.register_forward_pre_hook(self.change)

    def change(self, layer, inputs):
        with torch.no_grad():
            layer.bias.add_(1)


def go_wrong(runs):
    kinds = {"penalty": Penalty(), **{name: make() for name, make in SAVES.items()}}
    kinds |= {"frozen": Net(freezes=True), "logs": Logs(), "reads": Reads(), "manual": Manual()}
    kinds |= {"lone change": ChangesAlone(), "change in a unit": ChangesInUnit()}
    kinds["saves within"] = SavesWithin()
    without = ("frozen", "manual", "saves within")
    module, options = kinds.get(runs) or Skips(runs), {} if runs in without else UNITS
    trainer = one_trainer(strategy="fsdp", strategy_options=options, devices=2)
    trainer.fit(module, DataLoader(samples(), 6))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (
            "others",
            r"different collectives: rank 0 in the gather of second \(test_training.py:\d+\); "
            r"rank 1 in the gather of extra \(.*Fix: run the same parts on each rank",
        ),
        ("fewer", r"did not use these parameters in a step: extra.weight, extra.bias. Fix: "),
        ("logs", r"self.log\('norm'\): ranks have parts of this tensor. Fix: .full_tensor()"),
        (
            "reads",
            r"test_training.py:\d+: a step used parameters of a unit that it did not call.*"
            r"Fix: --strategy.units CLASS",
        ),
        (
            "manual",
            r"parameters must be in units, and these are in none: first.weight, .* and 3 more",
        ),
        ("penalty", r"create_graph=True: torch's fully_shard loses a part of the gradient"),
        *(
            (f"saves {part}", r"rank 0 pickles a parameter.* call trainer.save_checkpoint\(path\)")
            for part in ("weights", "parameter")
        ),
        ("saves within", r"rank \d saves a checkpoint within a forward, which needs whole weights"),
        ("lone change", r"rank 1 differs from rank 0: the number of changes of first.weight is "),
        ("change in a unit", r"extra.bias was changed in a forward, where .* the change is lost"),
        ("frozen", r"requires_grad of second.weight was changed in a forward"),
    ],
)
def test_a_step_that_parts_make_wrong_is_an_error(tmp_path, runs, message):
    ranks = failed(tmp_path, go_wrong, runs)
    # The first rank in a collective may only see that the other one has gone.
    for rank in [rank for rank in ranks if "Connection" not in rank.error] or ranks:
        assert re.search(message, rank.error)


class FailsOnRank1(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1:
            raise KeyError("mine")


def fail_on_rank_1():
    options = {"model_checkpoint": {"save_on_exception": True}}
    trainer = one_trainer(
        strategy="fsdp", devices=2, output="run", plugins=[*options], plugin_options=options
    )
    trainer.fit(FailsOnRank1(), DataLoader(samples(), 6))


def test_rank_0_says_why_it_saves_no_exception_ckpt(tmp_path):
    rank_0 = failed(tmp_path, fail_on_rank_1)[0]
    assert "saves no exception.ckpt: the weights are sharded" in rank_0.printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": ["Linaer"]}, "Net has no part of class Linaer. Did you mean 'Linear'?"),
        ({"unit_parameters": 0}, "unit_parameters=0 must be above 0"),
        ({"shard_size": 3}, "2 ranks are no multiple of shard_size=3"),
        ({"param_dtype": "int8"}, "param_dtype='int8' must be bfloat16 or float16"),
        ({"offload": True}, "offload needs a GPU"),
    ],
)
def test_options(options, message):
    with pytest.raises(gt.UsageError, match=re.escape(message)):
        one_trainer(strategy="fsdp", strategy_options=options, devices=2).fit(
            Net(), DataLoader(samples(), 6)
        )
