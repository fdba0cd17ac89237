"""Set-up and tear-down of a process: their order, and the use of the owners' results."""

import inspect
import json
import pickle
import re
import sys

import pytest
import torch
from small_models import CountsInPlace, EvalNet, loader, samples, trainer
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import Layout, World, hookimpl
from geartrain.data.stage import Stage
from geartrain.testing import ThreadRanks


class Wrapped(nn.Module):
    """Counts its forward calls, in which DDP's wrapper would reduce."""

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, []

    def forward(self, method, *args):
        self.calls.append(method)
        return self.module(method, *args)


class Steps:
    """An optimizer around another."""

    def __init__(self, optimizer):
        self.inner, self.steps, self.param_groups = optimizer, 0, optimizer.param_groups

    def zero_grad(self, *args, **kwargs):
        self.inner.zero_grad(*args, **kwargs)

    def step(self):
        self.steps += 1
        self.inner.step()


class Strategy:
    """Owns all hooks of set-up and teardown, and records each call."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def plan_processes(self):
        return Layout(1, 1)

    @hookimpl
    def setup_device(self, local_rank):
        self.seen.append(("setup_device", local_rank))
        return torch.device("cpu")

    @hookimpl
    def setup_process_group(self, run):
        self.seen.append(("setup_process_group", run.device.type))
        return World()

    @hookimpl
    def shard_dataloader(self, loader, stage):
        self.seen.append(("shard_dataloader", stage))
        return list(loader)[:2]

    @hookimpl
    def wrap_model(self, run, model):
        self.seen.append(("wrap_model", run.world.size))
        return Wrapped(model)

    @hookimpl
    def wrap_optimizer(self, run, optimizer):
        self.seen.append(("wrap_optimizer", type(run.model).__name__))
        return Steps(optimizer)

    @hookimpl
    def teardown_process_group(self):
        self.seen.append(("teardown_process_group", None))

    @hookimpl
    def teardown_device(self):
        self.seen.append(("teardown_device", None))


def test_set_up_goes_in_the_order_of_the_contract_and_teardown_backwards():
    strategy = Strategy()
    trainer(strategy=strategy).fit(EvalNet(), loader(), loader())
    assert strategy.seen == [
        ("setup_device", 0),
        ("setup_process_group", "cpu"),
        ("shard_dataloader", "train"),
        ("shard_dataloader", "validate"),
        ("wrap_model", 1),
        ("wrap_optimizer", "Wrapped"),
        ("teardown_process_group", None),
        ("teardown_device", None),
    ]


def test_the_results_of_the_owners_are_trained():
    one = trainer(strategy=Strategy())
    one.fit(EvalNet(), loader(), loader())
    assert (
        one.global_step
        == one.run.optimizers[0].steps
        == len(one.run.stages["train"].loaders[0])
        == 2
    )
    # Evaluation calls the bare module: a wrapper's forward may communicate, and ranks may have
    # unequal numbers of batches.
    assert one.run.model.calls == ["training_step"] * 2


@pytest.mark.parametrize(
    ("command", "ranks"), [("fit", 2), ("validate", 1), ("test", 1), ("predict", 2)]
)
def test_the_hooks_of_a_model_that_was_wrapped_in_place_are_called(command, ranks):
    plugin, batches = CountsInPlace(), loader(batch_size=4 // ranks)
    strategy = ThreadRanks(ranks) if ranks > 1 else None
    one = trainer(plugins=[plugin], strategy=strategy, devices=ranks)
    getattr(one, command)(EvalNet(), *([batches] * (2 if command == "fit" else 1)))
    steps = ["training", "validation"] if command == "fit" else [command.replace("ate", "ation")]
    assert plugin.calls == {f"{step}_step": 6 for step in steps}


def test_by_default_model_optimizer_and_loader_are_the_users_own():
    class Keeps(EvalNet):
        def configure_optimizers(self):
            self.optimizer = super().configure_optimizers()
            return self.optimizer

    net, batches, one = Keeps(), DataLoader(list(samples()), 4), trainer()
    one.fit(net, batches)
    assert one.run.optimizers == [net.optimizer]
    assert one.run.stages["train"].loaders == [batches]
    assert one.run.model.module is net
    assert one.run.world == World(rank=0, size=1, local_rank=0, local_size=1, node_rank=0)


class _Launches(Strategy):
    """A wrong ``launch``."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    @hookimpl
    def launch(self, worker):
        if self.calls:
            worker(0)


@pytest.mark.parametrize(("calls", "command"), [(False, "fit"), (True, "validate")])
def test_a_launch_without_the_result_of_its_worker_is_an_error(calls, command):
    message = rf"launch of _Launches returned without the result of {command}. Fix: return worker"
    with pytest.raises(gt.TrainingError, match=message):
        getattr(trainer(strategy=_Launches(calls=calls)), command)(EvalNet(), loader())


def test_a_world_of_another_type_is_an_error():
    class Tuple(Strategy):
        @hookimpl
        def setup_process_group(self):
            return (0, 1, 0, 1, 0)

    with pytest.raises(
        gt.TrainingError,
        match=r"Tuple: setup_process_group returned \(0, 1, 0, 1, 0\). Fix: return geartrain.World",
    ):
        trainer(strategy=Tuple()).fit(EvalNet(), loader(), loader())


def test_loaders_stay_in_their_process():
    """A strategy sends numbers of batches to another process; loaders need not pickle."""
    stage = Stage([iter(())], [3], [4], True)
    assert pickle.loads(pickle.dumps(stage)) == Stage([], [3], [4], True)


class Leaves(EvalNet):
    """Leaves the program in one of its methods, on the last rank."""

    def __init__(self, method, code):
        super().__init__()
        self.method, self.code = method, code

    def leave(self, method):
        if method == self.method and self.global_rank == self.trainer.world_size - 1:
            sys.exit(self.code)

    def setup(self, stage):
        self.leave("setup")

    def on_train_epoch_end(self):
        self.leave("on_train_epoch_end")

    def training_step(self, batch, batch_idx):
        self.leave("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.leave("validation_step")


@pytest.mark.parametrize(
    ("method", "code", "ranks"),
    [("setup", None, 1), ("training_step", 0, 1), ("validation_step", 0, 2), ("setup", None, 2)],
)
def test_sys_exit_fails_the_run_and_names_the_line(method, code, ranks, tmp_path):
    strategy = {"strategy": ThreadRanks(2)} if ranks == 2 else {}
    one = trainer(output=tmp_path / "run", **strategy)
    line = inspect.getsourcelines(Leaves.leave)[1] + 2
    place = re.escape(f"sys.exit({code!r}) in {__file__}:{line}. Fix: ")
    with pytest.raises(gt.TrainingError, match=f"rank {ranks - 1} left .* leave called {place}"):
        one.fit(Leaves(method, code), loader(), loader())
    if method != "setup":
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_sys_exit_with_a_code_ends_the_program_with_that_code(tmp_path):
    with pytest.raises(SystemExit) as ended:
        trainer(output=tmp_path / "run").fit(Leaves("training_step", 3), loader())
    assert ended.value.code == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
