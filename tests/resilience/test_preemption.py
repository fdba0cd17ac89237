"""The plugin ``preemption``: all ranks save in the same step, and the fit goes on bit for bit."""

import json
import os
import signal

import pytest
import torch
from small_models import Logging, loader, trainer

import geartrain as gt
from geartrain import hookimpl
from geartrain.callbacks import EMA, ModelCheckpoint
from geartrain.testing import run_plugin
from geartrain_resilience.preemption import Preempted, Preemption

NEVER = 1e9


class Signal:
    """Sends this process a signal in a step, on the ranks that the plugin runs on."""

    def __init__(self, step, number=signal.SIGTERM, times=1):
        self.step, self.number, self.times = step, number, times

    @hookimpl
    def on_before_optimizer_step(self, run):
        if run.step + 1 == self.step and run.world.rank == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def train(output, *plugins, path=None, **options):
    more = {"log_every_n_steps": 2, "max_epochs": 3, "seed": 1, **options}
    one = trainer(output=output, plugins=list(plugins), **more)
    module = Logging(
        lambda self, batch, idx: self.log("loss", self.loss(batch)),
        lambda self, batch, idx: self.log("val_loss", self.loss(batch)),
    )
    module.layers.append(torch.nn.Dropout(0.2))
    one.fit(module, loader(shuffle=True), loader(), ckpt_path=path)
    return one, module


@pytest.mark.parametrize("step", [1, 4, 6, 9, 17])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_it_saves_at_the_end_of_the_step_and_the_fit_goes_on_bit_for_bit(
    tmp_path, step, number, capsys
):
    before = signal.getsignal(number)
    _, whole = train(tmp_path / "whole", EMA(decay=0.9))
    with pytest.raises(Preempted) as ended:
        train(tmp_path / "run", EMA(decay=0.9), Preemption(seconds=NEVER), Signal(step, number))
    name = signal.Signals(number).name
    assert f"geartrain: {name}: saved after step {step} in " in capsys.readouterr().err
    assert ended.value.code == 75
    assert signal.getsignal(number) is before
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["step"] == step
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", step)
    _, rest = train(tmp_path / "run", EMA(decay=0.9), Preemption(), path="last")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, rest.state_dict()[name])
    assert not {"preempt", "preempted.json"} & {path.name for path in (tmp_path / "run").iterdir()}


def test_what_other_plugins_do_after_the_step_is_saved_with_it(tmp_path):
    """Also those that are given later, and are wrappers, as ModelCheckpoint."""
    plugins = [Preemption(), Signal(4), ModelCheckpoint(every_n_train_steps=4, filename="{step}")]
    with pytest.raises(Preempted):
        train(tmp_path / "run", *plugins)
    assert (tmp_path / "run" / "checkpoints" / "step=4.ckpt").exists()


def test_the_last_step_ends_the_fit_as_always(tmp_path):
    one, _ = train(tmp_path / "run", Preemption(), Signal(6), max_steps=6)
    assert one.global_step == 6


def test_a_second_signal_ends_the_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("geartrain_resilience.preemption._SAME", 0.0)
    with pytest.raises(KeyboardInterrupt, match="second signal") as ended:
        train(tmp_path / "run", Preemption(), Signal(3, times=2))
    assert not isinstance(ended.value, Preempted)
    assert not (tmp_path / "run" / "last.ckpt").exists()


def test_the_same_signal_from_two_senders_is_one(tmp_path):
    with pytest.raises(Preempted):
        train(tmp_path / "run", Preemption(), Signal(3, times=2))


class Asks:
    """Asks on one rank, in a step, as a signal on that rank does."""

    def __init__(self, rank, step, plugin):
        self.rank, self.step, self.plugin = rank, step, plugin

    @hookimpl
    def on_before_optimizer_step(self, run):
        if (run.world.rank, run.step + 1) == (self.rank, self.step):
            self.plugin._asked = "SIGTERM"


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 2])
def test_all_ranks_save_in_the_same_step(tmp_path, rank, first):
    plugin = Preemption(seconds=1e-9)
    results = run_plugin(
        [plugin, Asks(rank, 3, plugin)],
        ranks=3,
        first=first,
        check=False,
        max_epochs=2,
        output=tmp_path / "run",
    )
    assert [type(result.error) for result in results] == [Preempted] * 3
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["step"] == 3


def test_agreements_are_as_far_apart_as_the_steps_of_the_slowest_rank_allow(tmp_path):
    plugin = Preemption(seconds=NEVER)
    results = run_plugin(
        [plugin, Asks(1, 2, plugin)], ranks=2, check=False, max_epochs=1, output=tmp_path / "run"
    )
    # The first agreement is in step 1, and the fit ends before the next.
    assert [result.error for result in results] == [None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": "SIGKILL"}, "'SIGKILL' is none of SIGTERM"),
        ({"signals": []}, "signals is empty"),
        ({"seconds": 0}, "must be above 0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(gt.UsageError, match=message):
        Preemption(**options)


def test_it_needs_a_folder():
    with pytest.raises(gt.UsageError, match="Fix: --output DIR"):
        train(None, Preemption())
