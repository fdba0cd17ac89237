"""Ranks that start again, here as threads: they do as before, and have the same state."""

import pytest

from .models import Curriculum, Data, Rises, Stops, fit, state
from .threads import use_threads

#: In the first epoch, in the second before and after its first step, and in its validation.
PLACES = [("training_step", 1), ("training_step", 2), ("training_step", 3), ("validation_step", 4)]


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    use_threads(monkeypatch)


def check(tmp_path, places=PLACES, net=None, data=Data, **options):
    """Compare a run whose ranks start again in several places with a quiet one."""
    results = []
    for name, kills in ("quiet", []), ("again", [(*place, 1, "error") for place in places]):
        folder = tmp_path / name
        flags = {"flags": str(tmp_path), "kills": kills}
        changed = {"log_every_n_steps": 4, "net": {**(net or {}), **flags}, "data": data()}
        results.append(state(folder, fit(folder, 1, **changed, **options)[1]))
    assert len(list(tmp_path.glob("killed-*"))) == len(places)
    assert results[0] == results[1]


@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_train_epoch_start"])
def test_a_data_module_with_state(tmp_path, event):
    check(tmp_path, net={"event": event}, kind=Rises, data=Curriculum)


@pytest.mark.parametrize(
    "options",
    [
        {"max_time": "00:01:00:00", "val_check_interval": "00:01:00:00"},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=["times", "loaders"],
)
def test_options_for_which_ranks_agree(tmp_path, options):
    check(tmp_path, PLACES[:3], {"event": "on_train_epoch_end"}, kind=Rises, **options)


def test_a_rank_that_has_asked_for_the_end(tmp_path):
    check(tmp_path, [("validation_step", 2)], kind=Stops)


def test_an_error_that_comes_again(tmp_path):
    with pytest.raises(ValueError, match="my own error"):
        fit(tmp_path, 1, net={"raises": ("training_step", 2, 1)})
