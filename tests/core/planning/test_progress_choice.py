"""The choice of the plugin that shows progress. Core has none."""

import pytest
from small_models import fit, trainer

from geartrain import hookimpl

from ..contract_fixtures import dists as dists


class Mine:
    shows_progress = True

    @hookimpl
    def on_epoch_end(self):
        print("mine")


def chosen(**options):
    return [part.label for part in trainer(enable_progress_bar=True, **options).plan.plugins]


def test_the_plugin_progress_is_chosen_if_it_is_installed():
    assert chosen() == ["geartrain-callbacks[progress]"]
    assert chosen(block=["progress"]) == []
    assert trainer().plan.plugins == ()
    (part,) = trainer(enable_progress_bar=True).plan.plugins
    assert part.reason == "enable_progress_bar=True"


def test_core_alone_prints_nothing(dists, capsys):
    fit(enable_progress_bar=True, max_epochs=2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("plugin", "label"), [("progress_lines", "geartrain-callbacks[progress_lines]"), (Mine, "Mine")]
)
def test_a_plugin_that_is_given_and_shows_progress_is_the_only_one(plugin, label, capsys):
    assert chosen(plugins=[plugin]) == [label]
    fit(plugins=[plugin], enable_progress_bar=True)
    assert "━" not in capsys.readouterr().err


def test_a_bar_that_cannot_be_imported_is_warned_of(dists):
    dists.add("geartrain-callbacks", "1 / 0", plugins={"progress": "Bar"})
    with pytest.warns(
        UserWarning,
        match=r"geartrain-callbacks\[progress\] is not used: .*ZeroDivisionError.*Fix: ",
    ):
        assert chosen() == []
