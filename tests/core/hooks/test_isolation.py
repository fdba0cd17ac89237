"""Plugins with ``errors_are_warnings = True``: after one warning the run continues without."""

import pytest
from small_models import Loggers, Net, fit, loader, trainer

from geartrain import UsageError, hookimpl


class Breaks:
    """A logger that raises in the hooks in ``where``, and records its calls."""

    errors_are_warnings = True

    def __init__(self, *where, error=OSError):
        self.where, self.error, self.called = where, error, []

    def note(self, hook):
        self.called.append(hook)
        if hook in self.where:
            raise self.error("disk full")

    @hookimpl
    def on_run_start(self):
        self.note("on_run_start")

    @hookimpl
    def log_metrics(self, metrics, step):
        self.note("log_metrics")

    @hookimpl
    def on_epoch_end(self):
        self.note("on_epoch_end")

    @hookimpl
    def on_run_end(self):
        self.note("on_run_end")

    @hookimpl
    def on_exception(self, error):
        self.note("on_exception")


class Logs(Net):
    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return self.loss(batch)


@pytest.mark.parametrize("hook", ["on_run_start", "log_metrics", "on_epoch_end"])
def test_training_continues_with_one_warning_and_without_the_plugin(hook):
    broken, other = Breaks(hook), Loggers()
    with pytest.warns(UserWarning, match="Breaks") as caught:
        one = fit(Logs(), max_epochs=2, log_every_n_steps=1, plugins=[other, broken])
    (warning,) = [str(w.message) for w in caught if "Breaks" in str(w.message)]
    assert (
        warning
        == f"Breaks: {hook} raised OSError: disk full. The run continues without this plugin."
    )
    assert one.global_step == 12
    assert len(other.lines) == 12
    assert broken.called.count(hook) == 1
    assert broken.called[-1] == "on_run_end"  # it can close its files
    assert broken.called[broken.called.index(hook) :] == [hook, "on_run_end"]


def test_errors_of_closing_after_another_raise_no_second_warning():
    broken = Breaks("log_metrics", "on_run_end")
    with pytest.warns(UserWarning, match="Breaks") as caught:
        fit(Logs(), plugins=[broken])
    assert len([w for w in caught if "Breaks" in str(w.message)]) == 1


def test_the_next_run_tries_again():
    broken = Breaks("log_metrics")
    one = trainer(plugins=[broken])
    for _ in range(2):
        with pytest.warns(UserWarning, match="Breaks: log_metrics"):
            one.fit(Logs(), loader())
    assert broken.called.count("log_metrics") == 2


def test_the_users_own_error_is_not_hidden():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("mine")

    broken = Breaks("on_exception")
    with (
        pytest.warns(UserWarning, match="Breaks: on_exception"),
        pytest.raises(ValueError, match="mine"),
    ):
        fit(Fails(), plugins=[broken])


def test_an_error_that_ends_the_program_is_not_caught():
    with pytest.raises(KeyboardInterrupt):
        fit(Logs(), plugins=[Breaks("log_metrics", error=KeyboardInterrupt)])


def test_a_refusal_before_the_run_stops_it():
    class Refuses(Breaks):
        @hookimpl
        def check_plan(self, plan):
            raise UsageError("no folder")

    with pytest.raises(UsageError, match="no folder"):
        fit(Logs(), plugins=[Refuses()])


def test_a_wrapper_is_refused():
    @hookimpl(wrapper=True, specname="on_epoch_end")
    def around(self):
        return (yield)

    wraps = type("Wraps", (), {"errors_are_warnings": True, "around": around})
    with pytest.raises(
        UsageError,
        match=r"Wraps: its hookimpl 'around' is a wrapper, and errors_are_warnings = True .*Fix",
    ):
        trainer(plugins=[wraps()])


def test_an_error_of_a_hook_that_the_plugin_owns_is_no_warning():
    class Owns(Breaks):
        replaces = frozenset({"forward"})

        @hookimpl
        def forward(self):
            raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        fit(plugins=[Owns()])
