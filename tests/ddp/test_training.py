"""Two ranks of ddp train like one process; wrong options and models are refused."""

import os
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
from fresh import words_of
from several_ranks import failed, kept_by, results
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain.parallel import ProcessGroupStrategy
from geartrain_ddp import DDPStrategy
from geartrain_testing.launching import until

from .cases import CASES, Net, ddp, one_trainer, samples, train, weights


def train_all():
    """Return the loss curve and the weights of each case."""
    return {name: train(name, ranks=2)[1:] for name in CASES}


two_ranks = kept_by(train_all)


@cache
def one_process(name):
    _, curve, weights = train(name)
    return curve, weights


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(two_ranks, name):
    curve, weights = one_process(name)
    theirs, trained = two_ranks[0][name]
    assert len(curve) > 1
    assert theirs == pytest.approx(curve, rel=1e-5)
    # LBFGS divides by small differences of gradients, which amplifies rounding.
    rtol, atol = (1e-4, 1e-5) if name == "lbfgs" else (1e-5, 1e-6)
    for key, expected in weights.items():
        torch.testing.assert_close(trained[key], expected, rtol=rtol, atol=atol)
        assert torch.equal(trained[key], two_ranks[1][name][1][key]), f"{key} differs between ranks"


def validate_other_weights():
    """Validate a model whose weights are this rank's own, as without a seed."""
    module = Net()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float(os.environ["RANK"]))
    ddp().validate(module, DataLoader(samples(), batch_size=8))
    return weights(module)


def test_each_rank_evaluates_the_weights_of_rank_0(tmp_path):
    for found in results(tmp_path, validate_other_weights):
        assert not any(weight.any() for weight in found.values())


# --- refused -------------------------------------------------------------------------------------


class Alone(ProcessGroupStrategy):
    @hookimpl
    def setup_process_group(self, run):
        run.store.set(f"came {run.cluster.rank}", "")
        run.store.wait(["came 0", "came 1"])
        return gt.World()


class Late(Net):
    """Rank 1 starts the second step when rank 0 has given up."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            until(Path("given-up").exists, 30, "rank 0 has given up")
        return super().training_step(batch, batch_idx)


def wait_for_a_late_rank():
    try:
        ddp(strategy_options={"timeout": 2}).fit(Late(), DataLoader(samples(), batch_size=4))
    finally:
        Path("given-up").touch()


def test_the_timeout_may_be_a_timedelta():
    assert DDPStrategy(timeout=timedelta(seconds=5)).timeout == DDPStrategy(timeout=5).timeout
    with pytest.raises(gt.UsageError, match=r"timeout=0\.0 must be above 0"):
        DDPStrategy(timeout=timedelta(0))


def test_a_rank_waits_no_longer_than_the_strategys_timeout(tmp_path):
    first, second = failed(tmp_path, wait_for_a_late_rank)
    assert "imed out" in first.error
    assert "not within 30 s" not in second.error


def train_alone():
    one_trainer(strategy=Alone(), devices=2).fit(Net(), DataLoader(samples(), batch_size=4))


def test_strategy_that_would_train_alone_is_refused(tmp_path):
    # Without a supervisor, the second rank may only find that the first has gone.
    errors = [rank.error for rank in failed(tmp_path, train_alone)]
    assert any(
        "the plan has 2 processes" in error and "made a world of 1" in error for error in errors
    ), errors


@pytest.mark.parametrize("backend", ["nccl", "glooo"])
def test_an_unusable_backend_is_refused_before_anything_starts(capsys, backend):
    options = (
        "--strategy",
        "ddp",
        "--devices",
        "2",
        "--accelerator",
        "cpu",
        "--strategy.process_group_backend",
        backend,
    )
    with pytest.raises(SystemExit) as ended:
        gt.cli(Net, argv=["fit", *options])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert f"process_group_backend='{backend}' cannot be used on cpu.\nFix: gloo" in printed
    assert "Traceback" not in printed


def test_one_rank_leaves_the_environment_as_it_was():
    before = dict(os.environ)
    for _ in range(2):
        trainer = ddp(devices=1)
        trainer.fit(Net(), DataLoader(samples(), batch_size=4))
        assert dict(os.environ) == before
        assert trainer.world_size == 1


WITHOUT_COMPILER = """
import sys, torch
from regression import Net, one_trainer, samples

one_trainer(strategy="ddp").fit(Net(), torch.utils.data.DataLoader(samples(), 24))
print("torch._dynamo" in sys.modules)
assert torch._dynamo.config.optimize_ddp is True
mark = torch.nn.parallel.DistributedDataParallel._inside_ddp_forward.__wrapped__.__wrapped__
print("__dynamo_disable" in vars(mark))
"""


def test_ddp_does_not_import_the_compiler():
    assert words_of(WITHOUT_COMPILER) == ["False", "False"]
