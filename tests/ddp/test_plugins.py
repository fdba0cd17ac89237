"""Plugins for several processes, as pip packages: one that extends ddp, and a strategy as a newcomer would write it."""

import re
from importlib.metadata import requires, version

import pytest
import torch

from geartrain.testing.launching import Launched

from ..integration import conftest as installed
from .cases import train
from .ranks import PREAMBLE

PACKAGES = ("fp16-compressor", "newcomer-strategy")

TRAIN = """
def main(**options):
    module, curve = Net(optimizer="adam"), Curve()
    trainer = one_trainer(devices=2, plugins=[curve, *options.pop("named", ())], max_epochs=2, **options)
    trainer.fit(module, DataLoader(samples(), batch_size=4))
    keep(trainer, curve=curve.values, weights=module.state_dict(), plan=trainer.plan.strategy.label)


"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A fresh environment with core, ddp and the packages, each from its wheel."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    root = installed.ROOT
    sources = [root / "core", root / "plugins" / "ddp", *(root / "tests" / "packages" / name for name in PACKAGES)]
    return installed.environment(folder, installed.build(wheels, sources))


def trained(site, folder, body):
    """What each of two ranks kept."""
    (folder / "train.py").write_text(PREAMBLE + TRAIN + body, encoding="utf-8")
    run = Launched([str(site.python), "train.py"], folder)
    try:
        run.succeed(60)
    finally:
        run.kill()
    return [torch.load(folder / f"kept-{rank}.pt", weights_only=False) for rank in range(2)]


def test_newcomers_strategy_trains_two_processes_as_one(site, tmp_path):
    curve, weights = train("adam")[1:]
    ranks = trained(site, tmp_path, 'main(strategy="newcomer")')
    assert ranks[0]["curve"] == pytest.approx(curve, rel=1e-5)
    for rank in ranks:
        assert rank["plan"] == "newcomer-strategy[newcomer]"
        for key, expected in weights.items():
            torch.testing.assert_close(rank["weights"][key], expected, rtol=1e-5, atol=1e-6)


def test_compressor_trains_close_to_uncompressed(site, tmp_path):
    weights = train("adam")[2]
    first, second = trained(site, tmp_path, 'main(strategy="ddp", named=["fp16_compressor"])')
    assert first["plan"] == "geartrain-ddp[ddp]"
    for key, expected in weights.items():
        torch.testing.assert_close(first["weights"][key], expected, rtol=1e-2, atol=1e-3)
        assert torch.equal(first["weights"][key], second["weights"][key])
    assert any(not torch.equal(first["weights"][key], expected) for key, expected in weights.items())  # it was at work
    assert first["curve"] == pytest.approx(train("adam")[1], rel=1e-2)


def test_compressor_without_ddp_is_an_unknown_hook(site, tmp_path):
    done = site.geartrain("fit", installed.TARGET, "--plugin", "fp16_compressor", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "fp16-compressor[fp16_compressor]" in done.stderr
    assert "reduce_bucket" in done.stderr
    assert "Traceback" not in done.stderr


def test_versions_agree_and_ddp_says_which_geartrain_it_needs():
    assert version("geartrain") == version("geartrain-ddp")
    needs = [line for line in requires("geartrain-ddp") if re.match(r"geartrain\b(?!-)", line)]
    assert needs == ["geartrain<0.2,>=0.1"]
