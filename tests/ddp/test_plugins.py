"""Plugins for several processes: one extends ddp, one is a newcomer's strategy; also as wheels."""

import re
import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest
import torch
from several_ranks import ROOT, kept_by
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_testing.launching import Launched

from ..integration import conftest as installed
from .cases import Curve, Net, one_trainer, samples, train, weights

PACKAGES = ("fp16-compressor", "newcomer-strategy")
sys.path += [str(ROOT / "tests" / "packages" / name / "src") for name in PACKAGES]
from fp16_compressor import Fp16Compressor  # noqa: E402
from newcomer_strategy import NewcomerStrategy  # noqa: E402


def train_with(named=(), **options):
    """Return the loss of each step, the weights and the strategy's label."""
    module, curve = Net(optimizer="adam"), Curve()
    trainer = one_trainer(devices=2, plugins=[curve, *named], max_epochs=2, **options)
    trainer.fit(module, DataLoader(samples(), batch_size=4))
    return {"curve": curve.values, "weights": weights(module), "plan": trainer.plan.strategy.label}


def train_with_each():
    return {
        "newcomer": train_with(strategy=NewcomerStrategy()),
        "compressor": train_with([Fp16Compressor()], strategy="ddp"),
    }


kept = kept_by(train_with_each)


def check_newcomer(ranks):
    _, curve, expected = train("adam")
    assert ranks[0]["curve"] == pytest.approx(curve, rel=1e-5)
    for rank in ranks:
        for key, value in expected.items():
            torch.testing.assert_close(rank["weights"][key], value, rtol=1e-5, atol=1e-6)


def check_compressor(ranks):
    _, curve, expected = train("adam")
    first, second = ranks
    assert first["plan"] == "geartrain-ddp[ddp]"
    for key, value in expected.items():
        torch.testing.assert_close(first["weights"][key], value, rtol=1e-2, atol=1e-3)
        assert torch.equal(first["weights"][key], second["weights"][key])
    # The compressor changed the weights.
    assert any(not torch.equal(first["weights"][key], value) for key, value in expected.items())
    assert first["curve"] == pytest.approx(curve, rel=1e-2)


def test_newcomers_strategy_trains_two_processes_as_one(kept):
    check_newcomer([rank["newcomer"] for rank in kept])


def test_compressor_trains_close_to_uncompressed(kept):
    check_compressor([rank["compressor"] for rank in kept])


def test_compressor_without_ddp_is_an_unknown_hook():
    with pytest.raises(gt.UsageError, match=r"Fp16Compressor.*reduce_bucket"):
        one_trainer(plugins=[Fp16Compressor()])


# --- from their wheels ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A new environment with core, ddp and the packages, each from its wheel."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    root = installed.ROOT
    sources = [
        root / "core",
        root / "plugins" / "parallel",
        root / "plugins" / "ddp",
        *(root / "tests" / "packages" / name for name in PACKAGES),
    ]
    return installed.environment(folder, installed.build(wheels, sources))


TRAIN = """
import os
import sys
sys.path.insert(0, {shared!r})
import torch
from regression import *
from torch.utils.data import DataLoader

module, curve = Net(optimizer="adam"), Curve()
trainer = one_trainer(devices=2, plugins=[curve, *{named!r}], max_epochs=2, strategy={strategy!r})
trainer.fit(module, DataLoader(samples(), batch_size=4))
kept = {{"curve": curve.values, "weights": weights(module), "plan": trainer.plan.strategy.label}}
torch.save(kept, f"kept-{{os.environ['RANK']}}.pt")
"""


def installed_results(site, folder, strategy, *named):
    """Train on two ranks and return each rank's results."""
    (folder / "train.py").write_text(
        TRAIN.format(
            shared=str(Path(__file__).parents[1] / "shared"), strategy=strategy, named=named
        )
    )
    run = Launched([str(site.python), "train.py"], folder)
    try:
        run.succeed(60)
    finally:
        run.kill()
    return [torch.load(folder / f"kept-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.build
def test_newcomers_wheel(site, tmp_path):
    ranks = installed_results(site, tmp_path, "newcomer")
    check_newcomer(ranks)
    assert ranks[0]["plan"] == "newcomer-strategy[newcomer]"


@pytest.mark.build
def test_compressors_wheel(site, tmp_path):
    check_compressor(installed_results(site, tmp_path, "ddp", "fp16_compressor"))


@pytest.mark.build
def test_compressors_wheel_without_ddp(site, tmp_path):
    done = site.geartrain("fit", installed.TARGET, "--plugin", "fp16_compressor", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "fp16-compressor[fp16_compressor]" in done.stderr
    assert "reduce_bucket" in done.stderr
    assert "Traceback" not in done.stderr


def test_versions_agree_and_ddp_declares_the_geartrain_it_needs():
    assert version("geartrain") == version("geartrain-ddp")
    needs = [line for line in requires("geartrain-ddp") if re.match(r"geartrain\b(?!-)", line)]
    assert needs == ["geartrain<0.2,>=0.1"]
