"""The plugin ``compile``: compiled once, clean checkpoints, the same results."""

import copy
from functools import partial

import pytest
import torch
from small_models import SGD, Net, fit, loader, trainer
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config

import geartrain as gt
from geartrain import UsageError
from geartrain.callbacks import EMA, ModelCheckpoint
from geartrain.testing import run_plugin
from geartrain_callbacks.compile import Compile

Eager = partial(Compile, backend="eager", fullgraph=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Reads(Net):
    """Logs and reads the run's counters in each step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("position", float(self.global_step + self.current_epoch + batch_idx))
        self.log("rank", float(self.trainer.global_rank))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Stack(Reads):
    """Calls its submodules, not itself, in the step."""

    forward = nn.Module.forward

    def loss(self, batch):
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.layers(x), y)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


@pytest.mark.parametrize("module", [Reads, Stack])
def test_logging_and_counters_cause_no_graph_break_and_no_recompilation(module):
    options = {"val": loader(), "log_every_n_steps": 1}
    fit(module(), plugins=[Eager()], **options)
    assert graphs() > 0
    counters.clear()
    fit(module(), plugins=[Eager()], max_epochs=2, accumulate_grad_batches=2, **options)
    assert graphs() == 0
    assert not counters["graph_break"]
    torch._dynamo.reset()
    trainer(plugins=[Eager()]).validate(module(), loader())
    assert graphs() > 0


def test_an_uneven_last_batch_compiles_once_more_in_the_first_epoch_only():
    fit(Net(), loader(10), plugins=[Eager()])
    assert graphs() <= 4  # the module and its layers, for two shapes
    counters.clear()
    for size in (10, 9, 7):
        fit(Net(), loader(size, batch_size=5), plugins=[Eager()], max_epochs=2)
    assert graphs() == 0


@pytest.mark.parametrize("module", [Reads, Stack])
def test_a_compiled_run_gives_the_weights_of_a_run_without_compile(module):
    plain, compiled = module(), module()
    fit(plain, max_epochs=2, seed=1, gradient_clip_val=0.1)
    one = fit(compiled, max_epochs=2, seed=1, gradient_clip_val=0.1, plugins=[Eager()])
    assert graphs() > 0
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    assert same(plain.state_dict(), compiled.state_dict())
    assert all(one._compiled_call_impl is None for one in compiled.modules())
    assert one.callback_metrics["loss"] > 0


@pytest.mark.parametrize(("first", "second"), [([Eager], []), ([], [Eager]), ([Eager], [Eager])])
def test_a_run_resumes_in_an_epoch_with_or_without_compile(tmp_path, first, second):
    whole, resumed = Reads(), Reads()
    fit(whole, max_epochs=2, seed=1)
    save = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=8, filename="8")
    fit(Reads(), max_epochs=2, max_steps=8, seed=1, plugins=[*(make() for make in first), save])
    state = torch.load(tmp_path / "8.ckpt", weights_only=True)["model"]
    assert state.keys() == whole.state_dict().keys()
    one = trainer(max_epochs=2, seed=1, plugins=[make() for make in second])
    one.fit(resumed, loader(), ckpt_path=tmp_path / "8.ckpt")
    assert same(whole.state_dict(), resumed.state_dict())


def test_blocks_of_a_region_share_one_compilation():
    plugin, module = Eager(regions=["Block"]), Reads()
    names = []

    class Look:
        @gt.hookimpl
        def on_run_start(self, run):
            names.extend(plugin.compiled)

    fit(module, plugins=[plugin, Look()])
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
    assert graphs() == 2  # an input that needs no gradient, and those of the other blocks


def test_many_different_networks_are_all_compiled():
    class Many(Stack):
        def __init__(self):
            super().__init__()
            wide = [nn.Sequential(nn.Linear(3, n), nn.Linear(n, 3)) for n in range(1, 10)]
            self.blocks = nn.ModuleList(wide)

    fit(Many(), plugins=[Eager()])
    assert graphs() == 10  # torch keeps eight of one code object


def test_a_deep_copy_in_the_run_and_ema_are_not_the_compiled_module():
    class Copies(Reads):
        def on_train_start(self):
            self.__dict__["twin"] = copy.deepcopy(self.layers)
            x = torch.ones(1, 3)
            self.twin[0].weight.data.zero_()
            assert not torch.equal(self.eval().layers(x), self.twin.eval()(x))
            self.train()

    fit(Copies(), val=loader(), plugins=[Eager(), EMA()])


def test_lbfgs_and_half_precision():
    fit(Net(torch.optim.LBFGS), plugins=[Eager()])
    fit(Net(), plugins=[Eager()], precision="bf16-mixed")
    fit(Net(), plugins=[Eager()], precision="bf16-true")
    assert not counters["graph_break"]


def test_manual_optimisation():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    plain, compiled = (torch.manual_seed(1) and Manual() for _ in range(2))
    fit(plain)
    fit(compiled, plugins=[Eager()])
    assert graphs() > 0
    assert same(plain.state_dict(), compiled.state_dict())


def test_ranks():
    for result in run_plugin(Eager()):
        assert result.error is None
    assert graphs() > 0


def test_networks_that_setup_makes():
    class Late(Net):
        def __init__(self):
            gt.Module.__init__(self)
            self.make_optimizer = SGD

        def setup(self, stage):
            self.layers = nn.Linear(3, 1)

    fit(Late(), plugins=[Eager()])
    assert graphs() > 0
    with pytest.raises(gt.TrainingError, match="no submodule of a class 'Blok'"):
        fit(Late(), plugins=[Eager(regions=["Blok"])])


# --- errors ---------------------------------------------------------------------------------------


class Bare(gt.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        return self.weight.sum()

    def configure_optimizers(self):
        return SGD(self.parameters())


def compiled_net():
    return torch.compile(Net(), backend="eager")


@pytest.mark.parametrize(
    ("make", "plugin", "options", "message"),
    [
        (
            Reads,
            {"regions": ["Block", "Blok"]},
            {},
            "Reads has no submodule of a class 'Blok'.*'Blo",
        ),
        (Bare, {}, {}, "Bare has no submodule with parameters"),
        (Net, {}, {"strategy": "dp", "devices": 2}, "dp copies the module to each device"),
        (compiled_net, {}, {}, r"the plugin compile, which is chosen too\. Fix: leave one"),
    ],
)
def test_a_run_that_cannot_be_compiled_is_refused(make, plugin, options, message):
    with pytest.raises(UsageError, match=message):
        fit(make(), plugins=[Eager(**plugin)], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "max-autotun"}, "mode='max-autotun' does not.*Did you mean 'max-autotune'"),
        ({"backend": "inducto"}, "backend='inducto' does not exist.*Did you mean 'inductor'"),
        ({"backend": "eager", "mode": "default"}, "is of the backend inductor, not of eager"),
        ({"regions": []}, "regions is empty"),
    ],
)
def test_a_wrong_option_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Compile(**options)


def test_a_missing_cpp_compiler_is_refused_before_the_start(monkeypatch):
    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    with pytest.raises(UsageError, match=r"finds no C\+\+ compiler.*Fix: install g\+\+"):
        fit(Net(), plugins=["compile"])


def test_an_error_of_the_compiler_names_the_plugin():
    class Breaks(Net):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
        fit(Breaks(), plugins=[Eager()])
    assert any("geartrain-callbacks[compile]" in note for note in caught.value.__notes__)
    failing = Net(lambda parameters: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        fit(failing, plugins=[Eager()])
    assert not any("compile" in note for note in getattr(caught.value, "__notes__", ()))


# --- modules that the user compiled ---------------------------------------------------------------


def test_a_plain_model_that_the_user_compiled_trains_with_the_names_of_the_model(tmp_path):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model = copy.deepcopy(plain)
    mse = nn.functional.mse_loss
    trainer(seed=1).fit(plain, loader(), loss=mse, optimizer=SGD)
    compiled = torch.compile(model, backend="eager")
    save = ModelCheckpoint(dirpath=tmp_path, filename="1")
    one = trainer(seed=1, plugins=[save])
    one.fit(compiled, loader(), loss=mse, optimizer=SGD)
    state = torch.load(tmp_path / "1.ckpt", weights_only=True)["model"]
    assert state.keys() == plain.state_dict().keys()
    assert same(model.state_dict(), plain.state_dict())
    trainer().test(compiled, loader(), loss=mse, ckpt_path=tmp_path / "1.ckpt")


def test_a_module_that_the_user_compiled_trains_compiled_with_its_own_names(tmp_path):
    module, plain = Reads(), Reads()
    compiled = torch.compile(module, backend="eager")
    save = ModelCheckpoint(dirpath=tmp_path, filename="1")
    one = trainer(seed=1, plugins=[save])
    one.fit(compiled, loader())
    assert graphs() > 0
    trainer(seed=1).fit(plain, loader())
    assert same(module.state_dict(), plain.state_dict())
    state = torch.load(tmp_path / "1.ckpt", weights_only=True)["model"]
    assert state.keys() == plain.state_dict().keys()
    trainer().validate(compiled, loader(), ckpt_path=tmp_path / "1.ckpt")
    torch._dynamo.reset()
    counters.clear()
    trainer().validate(module, loader())
    assert graphs() == 0  # the module itself is not compiled
