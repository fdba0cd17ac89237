"""The frozen callers, and the plugin that an error names."""

import pytest

from geartrain import Module, TrainingError, UsageError, hookimpl
from geartrain.builtin.defaults import Defaults
from geartrain.hooks.manager import Hooks
from geartrain_monitor.profile.wrapping import wrap_implementations

from ..contract_fixtures import ALONE, Doubles, gather, hooks_of, owns, part, strategy

# --- freezing -------------------------------------------------------------------------------------


def test_owner_without_a_wrapper_freezes_to_its_bare_function():
    owner = Defaults()
    hooks = Hooks([part(owner, "default")])
    hooks.freeze()
    assert hooks.forward == owner.forward
    assert hooks.backward == owner.backward


def test_is_default_only_while_no_plugin_owns_or_wraps_the_hook():
    class Wraps:
        @hookimpl(wrapper=True)
        def clip_gradients(self):
            return (yield)

    hooks = hooks_of(strategy(owns("reduced", "reduce_gradients")), Wraps())
    hooks.freeze()
    assert [
        hooks.is_default(name) for name in ("micro_step", "reduce_gradients", "clip_gradients")
    ] == [True, False, False]
    assert hooks.reduce_gradients(run=None) == "reduced"
    assert hooks.clip_gradients(run=None) is None


@pytest.mark.parametrize(
    ("is_frozen", "more", "result"), [(False, [], 21), (True, [Doubles()], 42)]
)
def test_decorator_sees_every_call_and_changes_nothing(is_frozen, more, result):
    calls = []

    def decorate(function, impl, hook, label):
        if hook != "all_gather":
            return function

        def call(*arguments, **named):
            calls.append((label, impl.wrapper))
            return function(*arguments, **named)

        return call

    hooks = hooks_of(strategy(owns(21)), *more)
    wrap_implementations(hooks, decorate)
    if is_frozen:
        hooks.freeze()
    assert gather(hooks) == result
    assert [is_wrapper for _, is_wrapper in calls] == [True] * len(more) + [False]
    assert calls[-1][0] == hooks.owner("all_gather").label


def test_decorated_owner_without_a_result_is_still_refused():
    hooks = hooks_of(strategy(owns(None)))
    wrap_implementations(hooks, lambda function, *_: lambda *arguments: function(*arguments))
    with pytest.raises(TrainingError, match="'all_gather' returned None"):
        gather(hooks)


def test_frozen_hooks_refuse_a_decorator():
    hooks = hooks_of()
    hooks.freeze()
    with pytest.raises(UsageError, match="frozen"):
        wrap_implementations(hooks, lambda function, *_: function)


def test_monitor_set_before_the_freeze_gets_every_call_after_it():
    hooks, seen = hooks_of(), []
    hooks.manager.add_hookcall_monitoring(lambda name, *_: seen.append(name), lambda *_: None)
    hooks.freeze()
    hooks.barrier(run=ALONE)
    hooks.reduce_gradients(run=None)
    hooks.on_step_end(run=None)
    assert seen == ["barrier", "reduce_gradients", "on_step_end"]


# --- blame ----------------------------------------------------------------------------------------


class Fails:
    @hookimpl
    def on_step_end(self):
        raise RuntimeError("broken")


def blamed(hooks, call):
    with pytest.raises(RuntimeError, match="broken") as caught:
        call()
    hooks.explain(caught.value)
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("frozen", [False, True])
def test_blame_names_the_plugin_and_the_hook(frozen):
    hooks = hooks_of(part(Fails(), name="fails", distribution="acme"), owns(1, "on_step_end"))
    if frozen:
        hooks.freeze()
    (note,) = blamed(hooks, lambda: hooks.on_step_end(run=None))
    assert "acme[fails]" in note
    assert "'on_step_end'" in note


def test_blame_names_the_plugin_that_raised_not_the_one_that_wrapped():
    class Strategy:
        @hookimpl
        def all_gather(self):
            raise RuntimeError("broken")

    hooks = hooks_of(strategy(Strategy(), "ddp"), Doubles())
    (note,) = blamed(hooks, lambda: gather(hooks))
    assert "geartrain-strat[ddp]" in note


def test_blame_names_the_heir_that_raised():
    class Base:
        broken = False

        @hookimpl
        def on_step_end(self):
            if self.broken:
                raise RuntimeError("broken")

    class One(Base):
        broken = True

    class Two(Base): ...

    for plugins in ([One(), Two()], [Two(), One()]):
        hooks = hooks_of(*plugins)
        (note,) = blamed(hooks, lambda hooks=hooks: hooks.on_step_end(run=None))
        assert "One" in note


def test_blame_adds_no_note_for_core_and_for_the_users_own_code():
    hooks = hooks_of(part(Fails(), "core", "folder"))
    assert blamed(hooks, lambda: hooks.on_step_end(run=None)) == []

    def users():
        raise RuntimeError("broken")

    assert blamed(hooks, users) == []


def test_blame_spares_the_hook_that_called_the_users_module():
    class Model(Module):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    class Strategy:
        @hookimpl
        def forward(self, method):
            if method == "training_step":
                Model().training_step(None, 0)
            raise RuntimeError("broken by the strategy")

    hooks = hooks_of(strategy(Strategy(), "dp"))
    assert blamed(hooks, lambda: hooks.forward(run=None, method="training_step", args=())) == []
    (note,) = blamed(hooks, lambda: hooks.forward(run=None, method="test_step", args=()))
    assert "geartrain-strat[dp]" in note
