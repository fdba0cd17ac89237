"""The owner of a hook, its wrappers, and the order of an all-hook's implementations."""

from types import ModuleType

import pytest

from geartrain import TrainingError, UsageError, hookimpl, hookspec
from geartrain.hooks.manager import Hooks
from geartrain.plan import PlanRequest

from ..contract_fixtures import (
    ALONE,
    Doubles,
    accelerator,
    gather,
    hooks_of,
    owns,
    part,
    specs,
    strategy,
)

# --- owners ---------------------------------------------------------------------------------------


KINDS = ["strategy", "accelerator", "precision", "core"]


@pytest.mark.parametrize("first", range(len(KINDS)))
def test_strategy_owns_before_accelerator_before_precision_before_core_before_default(first):
    claims = [part(owns(kind), kind, kind) for kind in KINDS[first:]]
    hooks = hooks_of(*(reversed(claims) if first % 2 else claims))
    assert gather(hooks) == KINDS[first]
    assert hooks.owner("all_gather").label == KINDS[first]
    assert {c.name for c in hooks.passed_over("all_gather")} == {*KINDS[first + 1 :], "defaults"}
    assert [c.name for c in hooks.implementers("all_gather")] == [KINDS[first]]


def test_default_owns_a_hook_that_no_other_part_claims():
    hooks = hooks_of(strategy(owns(1)))
    assert hooks.owner("barrier").kind == "default"
    assert hooks.passed_over("barrier") == []


def test_hook_without_implementations_has_no_owner():
    assert Hooks([]).owner("barrier") is None
    assert hooks_of().owner("on_step_end") is None


def test_owner_that_returns_none_instead_of_a_value_is_named():
    hooks = hooks_of(strategy(owns(None, "setup_process_group")))
    with pytest.raises(
        TrainingError,
        match=r"geartrain-strat\[strat\]: .*'setup_process_group' returned None. Fix: return World",
    ):
        hooks.setup_process_group(run=None)


def test_part_passed_over_in_one_hook_still_answers_its_others():
    class Chip:
        @hookimpl
        def all_gather(self): ...
        @hookimpl
        def broadcast(self):
            return "chip"

    hooks = hooks_of(accelerator(Chip()), strategy(owns("strat")))
    assert gather(hooks) == "strat"
    assert hooks.broadcast(run=None, obj=1, src=0) == "chip"


def test_two_plugins_cannot_own_one_hook():
    one, two = owns(1), owns(2)
    one.replaces = two.replaces = {"all_gather"}
    with pytest.raises(UsageError, match=r"one.* and .*two.*all_gather"):
        hooks_of(part(one, name="one"), part(two, name="two"))


def test_specname_claims_the_hook_it_names():
    class Chip:
        @hookimpl(specname="all_gather")
        def collect(self):
            return "chip"

    class Strategy:
        @hookimpl(specname="all_gather")
        def gather_all(self):
            return "strat"

    hooks = hooks_of(accelerator(Chip()), strategy(Strategy()))
    assert gather(hooks) == "strat"
    assert [c.name for c in hooks.passed_over("all_gather")] == ["defaults", "chip"]


# --- wrappers, replaces ---------------------------------------------------------------------------


def test_wrapper_sees_and_changes_the_owners_result():
    hooks = hooks_of(strategy(owns(21)), Doubles())
    assert gather(hooks) == 42
    assert hooks.owner("all_gather").kind == "strategy"
    assert [c.name for c in hooks.wrappers("all_gather")] == ["Doubles"]


class Forgets:
    @hookimpl(wrapper=True)
    def forward(self):
        yield


class Adds:
    @hookimpl(wrapper=True)
    def forward(self):
        return (yield) + 1


@pytest.mark.parametrize("frozen", [False, True])
def test_wrapper_that_loses_the_owners_value_is_named_before_another_trips_over_it(frozen):
    hooks = hooks_of(
        strategy(owns(1, "forward")),
        part(Forgets(), distribution="acme"),
        part(Adds(), distribution="other"),
    )
    if frozen:
        hooks.freeze()
    with pytest.raises(
        TrainingError,
        match=r"acme\[Forgets\]: its wrapper of the hook 'forward' made None of the owner's int\.",
    ):
        hooks.forward(run=ALONE, method="training_step", args=())


def test_wrapper_may_return_none_if_the_owner_does():
    hooks = hooks_of(strategy(owns(None, "forward")), Forgets())
    assert hooks.forward(run=ALONE, method="validation_step", args=()) is None


def wraps(hook):
    """Return a plugin whose wrapper of the hook returns nothing."""

    @hookimpl(wrapper=True, specname=hook)
    def loses(self):
        yield

    return type("Plugin", (), {"loses": loses})()


def test_wrapper_that_loses_the_layout_is_an_error_of_usage():
    with pytest.raises(
        UsageError, match=r"Plugin: .*'plan_processes' made None of the owner's Layout"
    ):
        hooks_of(wraps("plan_processes")).plan_processes(request=PlanRequest("cpu", (0,), 1))


def test_wrapper_that_loses_the_results_of_all_implementations_is_named():
    hooks = hooks_of(wraps("device_stats"), owns({"load": 1.0}, "device_stats"))
    with pytest.raises(
        TrainingError, match=r"Plugin: .*'device_stats' made None of the owner's list"
    ):
        hooks.device_stats(run=None)


def test_wrapper_of_an_event_need_not_return_a_result():
    assert not hooks_of(wraps("on_run_start")).on_run_start(run=None)


def test_last_plugin_wraps_outermost():
    order = []

    def wraps(name):
        @hookimpl(wrapper=True)
        def barrier(self):
            order.append(name)
            return (yield)

        return part(type(name, (), {"barrier": barrier})())

    hooks = hooks_of(wraps("inner"), wraps("outer"))
    hooks.barrier(run=ALONE)
    assert order == ["outer", "inner"]
    assert [c.name for c in hooks.wrappers("barrier")] == order
    assert [c.name for c in hooks.implementers("barrier")] == [*order, "defaults"]


def test_strategy_may_wrap_without_owning():
    hooks = hooks_of(strategy(Doubles()))
    assert hooks.all_gather(run=ALONE, tensor=FakeTensor()) == "gathered" * 2
    assert hooks.owner("all_gather").kind == "default"


class FakeTensor:
    def __getitem__(self, _):
        return "gathered"


def test_observer_that_forgot_the_wrapper_is_shown_the_wrapper_form():
    class GradientNorm:
        @hookimpl
        def reduce_gradients(self, run):
            return 1.0

    with pytest.raises(UsageError) as caught:
        hooks_of(
            strategy(owns(None, "reduce_gradients"), "ddp"),
            part(GradientNorm(), distribution="acme"),
        )
    for words in (
        "acme[GradientNorm]",
        "geartrain-strat[ddp]",
        "@hookimpl(wrapper=True)",
        "def reduce_gradients(self, run):",
        "yield",
    ):
        assert words in str(caught.value)
    assert "replaces = {'reduce_gradients'}" in str(caught.value)


def test_plugin_that_replaces_owns_before_the_strategy():
    replaces = owns("plugin")
    replaces.replaces = frozenset({"all_gather"})
    hooks = hooks_of(part(replaces, name="replaces"), strategy(owns("strat")))
    assert gather(hooks) == "plugin"
    assert hooks.owner("all_gather").name == "replaces"
    assert {c.name for c in hooks.passed_over("all_gather")} == {"defaults", "strat"}


@pytest.mark.parametrize(
    ("replaced", "words"), [("barrier", "not implemented"), ("on_step_end", "every implementation")]
)
def test_replaces_must_name_a_single_hook_that_is_implemented(replaced, words):
    class Plugin:
        replaces = frozenset({replaced})

        @hookimpl
        def on_step_end(self): ...

    with pytest.raises(UsageError, match=f"Plugin.*{replaced}.*{words}"):
        hooks_of(Plugin())


def test_plain_hookimpl_beside_a_wrapper_of_the_same_hook_does_not_slip_past_the_owner():
    class Both:
        @hookimpl
        def all_gather(self):
            return "slipped past"

        @hookimpl(wrapper=True, specname="all_gather")
        def wraps_all_gather(self):
            return (yield)

    with pytest.raises(UsageError, match="Both"):
        hooks_of(strategy(owns("strat")), Both())


# --- a strategy's own hookspecs -------------------------------------------------------------------


@hookspec(firstresult=True)
def reduce_bucket(run, bucket):
    """A strategy's own hook."""


class Bucketing:
    hookspecs = specs(reduce_bucket=reduce_bucket)

    @hookimpl
    def reduce_bucket(self, bucket):
        return bucket


class Compression:
    @hookimpl(wrapper=True)
    def reduce_bucket(self, run, bucket):
        return [(yield)]


def test_plugin_rides_on_a_hook_that_the_strategy_brings():
    hooks = hooks_of(strategy(Bucketing(), "ddp"), Compression())
    hooks.freeze()
    assert hooks.reduce_bucket(run=None, bucket=7) == [7]
    assert "reduce_bucket" in hooks.names
    assert hooks.is_single("reduce_bucket")
    assert hooks.owner("reduce_bucket").name == "ddp"


def test_own_hookspecs_may_not_redefine_core():
    plugin = type("Strategy", (), {"hookspecs": specs(barrier=hookspec(lambda run: None))})()
    with pytest.raises(UsageError, match=r"geartrain-strat\[ddp\].*barrier"):
        hooks_of(strategy(plugin, "ddp"))


@pytest.mark.parametrize("name", ["owner", "freeze", "names"])
def test_own_hookspecs_may_not_hide_attributes_of_hooks(name):
    plugin = type("Strategy", (), {"hookspecs": specs(**{name: hookspec(lambda run: None)})})()
    with pytest.raises(UsageError, match=rf"geartrain-strat\[ddp\].*{name}"):
        hooks_of(strategy(plugin, "ddp"))


def test_module_that_imports_cores_hookspecs_brings_none_of_its_own():
    module = ModuleType("my_hooks")
    exec(
        "from geartrain import hookimpl, hookspecs\n"
        "@hookimpl\ndef on_epoch_end(run): return 'mine'",
        vars(module),
    )
    assert hooks_of(module).on_epoch_end(run=None) == ["mine"]


def test_own_hookspecs_without_any_hook_are_refused_by_name():
    with pytest.raises(UsageError, match=r"geartrain-strat\[ddp\]"):
        hooks_of(strategy(type("Strategy", (), {"hookspecs": specs()})(), "ddp"))


# --- all-hooks ------------------------------------------------------------------------------------


def test_all_hooks_call_the_last_registered_first_and_drop_none():
    core = part(owns("core", "device_stats"), "core", "folder")
    hooks = hooks_of(
        core,
        accelerator(owns("chip", "device_stats")),
        strategy(owns("strat", "device_stats")),
        owns("first", "device_stats"),
        owns(None, "device_stats"),
        owns("last", "device_stats"),
    )
    assert hooks.device_stats(run=None) == ["last", "first", "strat", "chip", "core"]
    assert [c.kind for c in hooks.implementers("device_stats")] == ["plugin"] * 3 + [
        "strategy",
        "accelerator",
        "core",
    ]
    assert not hooks.is_single("device_stats")
