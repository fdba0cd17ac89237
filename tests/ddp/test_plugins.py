"""Plugins for several processes: one extends ddp, one is a newcomer's strategy."""

import re
import sys
from importlib.metadata import requires, version

import pytest
import torch
from several_ranks import ROOT, kept_by
from torch.utils.data import DataLoader

import geartrain as gt

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


def test_versions_agree_and_ddp_declares_the_geartrain_it_needs():
    assert version("geartrain") == version("geartrain-ddp")
    needs = [line for line in requires("geartrain-ddp") if re.match(r"geartrain\b(?!-)", line)]
    assert needs == ["geartrain<0.2,>=0.1"]
