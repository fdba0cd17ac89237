"""Hydra composes a run; its options override the file, also in a sweep and on two ranks."""

import json

import pytest

pytestmark = [pytest.mark.example, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _hydra():
    pytest.importorskip("hydra", reason="tests/requirements.txt installs it")


SMALL = ["trainer.max_epochs=1", "model.hidden=8"]


@pytest.mark.parametrize(
    "strategy",
    [[], ["trainer.strategy=ddp_spawn", "trainer.devices=2"]],
    ids=["single", "ddp_spawn"],
)
def test_options_override_the_file(example, tmp_path, strategy):
    ran = example("hydra_app", *SMALL, *strategy, f"hydra.run.dir={tmp_path}", option=None)
    assert ran.code == 0, ran.errors
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["hyperparameters"] == {"hidden": 8, "lr": 0.002, "data.batch_size": 64}
    assert plan["options"]["max_epochs"] == 1
    assert plan["processes"] == (2 if strategy else 1)


def test_a_sweep_trains_each_combination(example, tmp_path):
    words = ["--multirun", *SMALL, "model.lr=1e-3,1e-2", f"hydra.sweep.dir={tmp_path}"]
    ran = example("hydra_app", *words, option=None)
    assert ran.code == 0, ran.errors
    summaries = sorted(tmp_path.glob("*/run/summary.json"))
    assert len({json.loads(path.read_text())["metrics"]["val_loss"] for path in summaries}) == 2
