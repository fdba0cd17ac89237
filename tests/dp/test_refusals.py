"""Plans and modules that dp and ddp2 refuse before a run, and the plans that they make."""

import json
import subprocess
import sys

import pytest
import torch
from several_ranks import command
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.strategies import DataParallelStrategy, DDP2Strategy

from .cases import Net, dp, one_trainer, samples

STRATEGIES = [DataParallelStrategy, DDP2Strategy]


class Moving(Net):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        raise AssertionError("never called")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [Moving, lambda: Moving], ids=["module", "class"])
def test_overridden_transfer_is_refused_with_the_fix(strategy, make):
    trainer = one_trainer(strategy=strategy(), devices=2)
    with pytest.raises(
        gt.UsageError,
        match=r"geartrain-dp\[\w+\]: Moving.transfer_batch_to_device .* Fix: on_after_batch_",
    ):
        trainer.check(make())
    trainer.check(Net())
    trainer.check(Net)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("given", "name"),
    [
        (16, "16-mixed"),
        ("bf16-true", "bf16-true"),
    ],
)
def test_16_bit_is_refused(strategy, given, name):
    trainer = one_trainer(strategy=strategy(), devices=2, precision=given)
    with pytest.raises(
        gt.UsageError,
        match=rf"geartrain-dp\[\w+\] trains in 32 or 64 bits, not in {name}: .*Fix: --precision 32",
    ):
        trainer.fit(Net(), DataLoader(samples(), batch_size=4))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_manual_optimisation_is_refused(strategy):
    class Manual(Net):
        automatic_optimization = False

    plan = one_trainer(strategy=strategy(), devices=2).plan
    for module in (Manual(), Manual):
        with pytest.raises(
            gt.UsageError, match=r"geartrain-dp\[\w+\]: Manual.automatic_optimization is False"
        ):
            strategy().check_plan(plan, module)
    with pytest.raises(gt.UsageError, match=r"Manual\.automatic_optimization is False"):
        dp().fit(Manual(), DataLoader(samples(), batch_size=4))


def test_several_nodes_need_ddp2():
    with pytest.raises(
        gt.UsageError,
        match=r"geartrain-dp\[dp\] uses devices of one node, not num_nodes=2. Fix: --strategy ddp2",
    ):
        dp(num_nodes=2)
    assert one_trainer(strategy="ddp2", devices=2, num_nodes=2).plan.processes == 2


def test_errors_that_ddp2_shares_with_ddp_have_the_name_of_ddp2():
    with pytest.raises(gt.UsageError, match=r"^geartrain-dp\[ddp2\]: timeout"):
        one_trainer(strategy="ddp2", devices=2, strategy_options={"timeout": 0.0})
    with pytest.raises(
        gt.UsageError,
        match=r"^geartrain-dp\[ddp2\]: process_group_backend='nccl' cannot be used on cpu",
    ):
        one_trainer(
            strategy="ddp2", devices=2, strategy_options={"process_group_backend": "nccl"}
        ).check(Net)


def test_other_devices_than_cpu_and_cuda_are_refused():
    class Other:
        priority = 0

        def unavailable(self):
            return None

        def device_count(self):
            return 2

        @gt.hookimpl
        def setup_device(self):
            return torch.device("meta")

    with pytest.raises(
        gt.TrainingError,
        match=r"geartrain-dp\[dp\] makes replicas on cpu and cuda only, not on meta",
    ):
        dp(accelerator=Other()).fit(Net(), DataLoader(samples(), batch_size=4))


# --- plans ----------------------------------------------------------------------------------------

SIZED = """
import geartrain as gt
import torch


class Sized(gt.Module):
    def __init__(self, batch_size: int = 31):
        super().__init__()

    def training_step(self, batch, batch_idx): ...
    def configure_optimizers(self): ...
"""


@pytest.fixture
def explained(tmp_path, monkeypatch):
    """``explained("dp", "--json")``: return the output of ``explain``."""
    (tmp_path / "sized.py").write_text(SIZED)
    monkeypatch.setenv("COLUMNS", "200")

    def explain(*words):
        done = command(
            tmp_path, "explain", "sized.py", "--accelerator", "cpu", "--strategy", *words
        )
        assert done.end == "0", done.printed
        return done.out

    return explain


@pytest.mark.parametrize(
    ("words", "processes", "sizes"),
    [
        (("dp", "--devices", "4"), 1, {"per_device": 8, "global": 31}),
        (
            ("dp", "--devices", "2", "--accumulate-grad-batches", "4"),
            1,
            {"per_device": 16, "global": 124},
        ),
        (("ddp2", "--devices", "4", "--num-nodes", "2"), 2, {"per_device": 8, "global": 62}),
        (("ddp2", "--devices", "4"), 1, {"per_device": 8, "global": 31}),
    ],
)
def test_explain_shows_processes_and_batch_sizes(explained, words, processes, sizes):
    facts = json.loads(explained(*words, "--json"))
    assert facts["strategy"]["distribution"] == "geartrain-dp"
    assert (facts["processes"], facts["batch_size"]) == (processes, sizes)
    assert facts["hooks"]["forward"] == [words[0]]


@pytest.mark.end_to_end
def test_auto_prefers_ddp_and_dp_imports_no_ddp(tmp_path):
    (tmp_path / "both.py").write_text(
        "import sys, geartrain as gt\n"
        "def made(strategy):\n"
        "    options = {'accelerator': 'cpu', 'devices': 2, 'enable_progress_bar': False}\n"
        "    return gt.Trainer(strategy=strategy, **options).plan.strategy.name\n"
        "print(made('dp'), 'geartrain_ddp' in sys.modules)\n"
        "print(made('auto'), 'geartrain_dp.ddp2' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "both.py")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["dp", "False", "ddp", "False"], done.stderr
