"""Optuna searches and prunes; on two ranks all of them end in the same epoch."""

import pytest

pytestmark = [pytest.mark.example, pytest.mark.timeout(240)]


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna", reason="tests/requirements.txt installs it")


@pytest.mark.parametrize(
    "strategy", [[], ["--strategy", "ddp_spawn", "--devices", 2]], ids=["single", "ddp_spawn"]
)
def test_bad_trials_are_pruned(optuna, example, tmp_path, strategy):
    storage = f"sqlite:///{tmp_path}/search.db"
    search = ["--trials", 2, "--epochs", 3, "--storage", storage]
    ran = example("optuna_search", *search, *strategy, option=None)
    assert ran.code == 0, ran.errors
    (study,) = optuna.get_all_study_names(storage)
    trials = optuna.load_study(study_name=study, storage=storage).trials
    found = [(trial.state.name, len(trial.intermediate_values)) for trial in trials]
    assert found == [("COMPLETE", 3), ("PRUNED", 2)]
    assert "best of 2, 1 pruned: val_acc 0.9" in ran.printed
