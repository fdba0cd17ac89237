"""The function of a W&B sweep, with values that are drawn without a server."""

import json
import random

import pytest

pytestmark = [pytest.mark.example, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _wandb(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="geartrain-wandb requires it")
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))


@pytest.mark.parametrize(
    "strategy", [[], ["--strategy", "ddp_spawn", "--devices", "2"]], ids=["single", "ddp_spawn"]
)
def test_each_run_trains_with_its_values(example, tmp_path, strategy):
    ran = example("wandb_sweep", "--offline", "--count", 2, "--epochs", 1, *strategy, option=None)
    assert ran.code == 0, ran.errors
    found = [json.loads(line.replace("'", '"')) for line in ran.printed.splitlines() if "{" in line]
    assert [set(values) for values in found] == [{"hidden", "lr", "val_acc"}] * 2
    assert found[0]["lr"] != found[1]["lr"]
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


def test_values_are_drawn_from_the_sweeps_configuration(part):
    sweep = part("wandb_sweep")
    parameters = sweep.SWEEP["parameters"]
    for seed in range(20):
        values = sweep.draw(parameters, random.Random(seed))
        assert values["hidden"] in parameters["hidden"]["values"]
        assert parameters["lr"]["min"] <= values["lr"] <= parameters["lr"]["max"]
