"""Plugins that say ``errors_are_warnings = True`` never stop a run: one warning, and they are left out of the rest of it."""

import copy
import warnings

import pytest
from small_models import Loggers, Net, fit, loader, trainer

from geartrain import UsageError, hookimpl


class Breaks:
    """A logger that breaks in the hooks in ``where``, and keeps what was called."""

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

    @hookimpl(wrapper=True)
    def barrier(self):
        return (yield)


class Logs(Net):
    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return self.loss(batch)


@pytest.mark.parametrize("hook", ["on_run_start", "log_metrics", "on_epoch_end"])
def test_training_goes_on_with_one_warning_and_without_the_plugin(hook):
    broken, other = Breaks(hook), Loggers()
    with pytest.warns(UserWarning, match="Breaks") as caught:
        one = fit(Logs(), max_epochs=3, log_every_n_steps=1, plugins=[other, broken])
    (warning,) = [str(w.message) for w in caught if "Breaks" in str(w.message)]
    assert warning == f"Breaks: {hook} raised OSError: disk full. The run goes on without it."
    assert one.global_step == 18
    assert len(other.lines) == 18
    assert broken.called.count(hook) == 1
    assert broken.called[-1] == "on_run_end"  # it can close what is open
    assert broken.called[broken.called.index(hook) :] == [hook, "on_run_end"]


def test_errors_of_closing_after_another_are_not_told_again():
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


def test_an_error_of_the_users_own_is_not_hidden():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("mine")

    broken = Breaks("on_exception")
    with pytest.warns(UserWarning, match="Breaks: on_exception"), pytest.raises(ValueError, match="mine"):
        fit(Fails(), plugins=[broken])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_no_error_passes(error):
    with pytest.raises(error):
        fit(Logs(), plugins=[Breaks("log_metrics", error=error)])


def test_a_refusal_before_the_run_stops_it():
    class Refuses(Breaks):
        @hookimpl
        def check_plan(self, plan):
            raise UsageError("no folder")

    with pytest.raises(UsageError, match="no folder"):
        fit(Logs(), plugins=[Refuses()])


def test_without_an_error_nothing_changes():
    fine = Breaks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = fit(Logs(), plugins=[fine])
    assert fine.called == ["on_run_start", "log_metrics", "on_epoch_end", "on_run_end"]
    assert [choice.name for choice in one.hooks.implementers("log_metrics")] == ["Breaks"]
    assert [choice.name for choice in one.hooks.wrappers("barrier")] == ["Breaks"]
    with pytest.raises(UsageError, match="given twice"):
        trainer(plugins=[fine, fine])


def test_others_still_stop_the_run():
    class Strict(Breaks):
        errors_are_warnings = False

    with pytest.raises(OSError, match="disk full"):
        fit(Logs(), plugins=[Strict("log_metrics")])


# --- wrappers ------------------------------------------------------------------------------------------------------------


class Around:
    """A wrapper of ``forward`` that breaks at ``where``: before its yield, after it, by not yielding, or by yielding twice."""

    errors_are_warnings = True

    def __init__(self, where, error=OSError):
        self.where, self.error, self.called, self.ended = where, error, 0, 0

    @hookimpl(wrapper=True)
    def forward(self, run):
        self.called += 1
        if self.where == "not":
            return None
        if self.where == "before":
            raise self.error("disk full")
        result = yield
        if self.where == "after":
            raise self.error("disk full")
        if self.where == "twice":
            yield
        return result

    @hookimpl
    def on_run_end(self):
        self.ended += 1


WRONG = {
    "before": "OSError: disk full",
    "after": "OSError: disk full",
    "not": "RuntimeError: the wrapper did not yield",
    "twice": "RuntimeError: the wrapper yielded twice",
}


def weights(one):
    return [p.tolist() for p in one.run.module.parameters()]


@pytest.mark.parametrize("where", WRONG)
def test_a_wrapper_that_breaks_gives_the_owners_result_on_and_is_left_out(where):
    module, broken = Net(), Around(where)
    without = fit(copy.deepcopy(module))
    with pytest.warns(UserWarning, match="Around") as caught:
        one = fit(module, plugins=[broken])
    assert [str(w.message) for w in caught] == [f"Around: forward raised {WRONG[where]}. The run goes on without it."]
    assert weights(one) == weights(without)
    assert (broken.called, broken.ended) == (1, 1)


@pytest.mark.parametrize("error", [ValueError, StopIteration, KeyboardInterrupt])
def test_the_owners_error_passes_through_a_wrapper_and_is_not_its_own(error):
    mine, around = error("mine"), Around("")

    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise mine

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error) as caught:
            fit(Fails(), plugins=[around])
    assert caught.value is mine


def test_a_wrapper_that_breaks_over_the_owners_error_does_not_hide_it():
    mine = ValueError("mine")

    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise mine

    class Hides:
        errors_are_warnings = True

        @hookimpl(wrapper=True)
        def forward(self):
            try:
                return (yield)
            except ValueError:
                raise OSError("disk full") from None

    with pytest.warns(UserWarning, match="Hides: forward raised OSError: disk full"), pytest.raises(ValueError, match="mine") as caught:
        fit(Fails(), plugins=[Hides()])
    assert caught.value is mine


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_interrupt_in_a_wrapper_passes(where):
    with pytest.raises(KeyboardInterrupt):
        fit(plugins=[Around(where, KeyboardInterrupt)])


def test_a_wrapper_that_loses_the_owners_result_gives_it_on_and_is_left_out():
    class Forgets:
        errors_are_warnings, calls = True, 0

        @hookimpl(wrapper=True)
        def forward(self):
            self.calls += 1
            yield

        @hookimpl(wrapper=True)
        def on_epoch_start(self):
            yield

    forgets = Forgets()
    with pytest.warns(UserWarning, match=r"Forgets: forward raised RuntimeError: the wrapper made None of the owner's Tensor"):
        one = fit(plugins=[forgets])
    assert (one.global_step, forgets.calls) == (6, 1)


def test_events_and_wrappers_are_left_out_together():
    class Both(Around):
        @hookimpl
        def log_metrics(self, metrics, step):
            raise OSError("disk full")

    both = Both("")
    with pytest.warns(UserWarning, match="Both: log_metrics") as caught:
        fit(Logs(), log_every_n_steps=2, plugins=[both])
    assert len(caught) == 1
    assert both.called == 2
