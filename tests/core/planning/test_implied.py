"""Plugins that a Trainer's argument or a module implies: entry points ``geartrain.implied``."""

import pytest
from small_models import Net, fit, loader, trainer

from geartrain import UsageError

from ..contract_fixtures import dists as dists

SOURCE = """
from geartrain import hookimpl

class Draws:
    def __init__(self, every=0):
        self.every = every

    @hookimpl
    def on_run_start(self, run):
        run.module.seen = (run.command, self.every)
"""


class Drawn(Net):
    seen = None

    def draw(self):
        """Is called by no core."""

    def validation_step(self, batch, batch_idx):
        """Validates."""


@pytest.fixture
def implied(dists):
    def add(**entries):
        dists.add("drawings", SOURCE, plugins={"draws": "Draws"}, implied=entries)

    return add


def test_a_method_of_the_module_implies_a_plugin(implied):
    implied(**{"Module.draw": "=draws"})
    net = Drawn()
    fit(net)
    assert net.seen == ("fit", 0)
    trainer().validate(net, loader())
    assert net.seen == ("validate", 0)
    assert not hasattr(fit(Net()).model, "seen")


def test_a_plugin_of_a_fit_is_in_no_other_run(implied):
    implied(**{"fit.Module.draw": "=draws"})
    net = Drawn()
    trainer().validate(net, loader())
    assert net.seen is None


def test_an_argument_implies_a_plugin_and_is_its_option(implied):
    implied(log_every_n_steps="=draws:every")
    net = Drawn()
    fit(net, log_every_n_steps=50)  # the default
    assert net.seen is None
    fit(net, log_every_n_steps=7)
    assert net.seen == ("fit", 7)


def test_a_plugin_that_is_chosen_too_is_refused(implied):
    implied(**{"Module.draw": "=draws"})
    message = "Drawn.draw selects the plugin draws, which is chosen too. Fix: leave one"
    with pytest.raises(UsageError, match=message):
        fit(Drawn(), plugins=["draws"])
