"""Wrong hookimpls are refused before anything starts; the error names the plugin and the fix."""

import functools
import sys
import types

import pytest

from geartrain import UsageError, hookimpl

from ..contract_fixtures import Doubles, dists as dists, gather, hooks_of, owns, part, strategy


def refused(function, *words, name=None):
    """Assert that a plugin with this hookimpl is refused; the error has ``words``."""
    name = name or function.__name__
    with pytest.raises(UsageError) as caught:
        hooks_of(part(type("Plugin", (), {name: function})(), distribution="acme"))
    for word in ("acme[Plugin]", name, "Fix:", *words):
        assert word in str(caught.value)


def test_unknown_hook_gets_the_nearest_name():
    @hookimpl
    def on_step_ends(self): ...

    refused(on_step_ends, "'on_step_end'")


def test_unknown_hook_may_be_of_a_plugin_that_is_not_chosen():
    @hookimpl
    def on_stalls(self, run): ...

    refused(on_stalls, "hook of another plugin or strategy", "choose that one too")


def test_unknown_hook_of_a_known_strategy_names_it():
    @hookimpl
    def reduce_bucket(self, run, bucket): ...

    refused(reduce_bucket, "select geartrain-ddp[ddp] (--strategy ddp), which brings this hook")


def test_unknown_hook_that_is_optional_is_allowed():
    class Plugin:
        @hookimpl(optionalhook=True)
        def reduce_bucket(self, run, bucket): ...

    hooks_of(Plugin())


def test_unknown_argument_gets_the_nearest_name():
    @hookimpl
    def log_metrics(self, metric): ...

    refused(log_metrics, "'metric'", "log_metrics(run, metrics, step)", "Did you mean 'metrics'?")


def test_keyword_only_argument():
    @hookimpl
    def on_step_end(self, *, run): ...

    refused(on_step_end, "'run'", "keyword")


@pytest.mark.parametrize("star", ["*args", "**kwargs"])
def test_star_arguments(star):
    space = {"hookimpl": hookimpl}
    exec(f"@hookimpl\ndef log_metrics(self, {star}): ...", space)
    refused(space["log_metrics"], f"*{star.strip('*')}", "run, metrics, step")


def test_default_that_shadows_an_argument_of_the_hook():
    @hookimpl
    def log_metrics(self, step=0): ...

    refused(log_metrics, "'step'", "default")


def test_default_of_an_argument_that_the_hook_does_not_have_is_allowed():
    class Plugin:
        @hookimpl
        def on_step_end(self, prefix="mine"):
            return prefix

    assert hooks_of(Plugin()).on_step_end(run=None) == ["mine"]


@pytest.mark.parametrize("order", ["tryfirst", "trylast"])
def test_tryfirst_and_trylast(order):
    @hookimpl(**{order: True})
    def on_step_end(self): ...

    refused(on_step_end, order)


def test_old_hookwrapper():
    @hookimpl(hookwrapper=True)
    def barrier(self):
        yield

    refused(barrier, "hookwrapper", "wrapper=True")


@pytest.mark.parametrize("name", ["on_step_end", "barrier"])
def test_generator_that_is_not_marked_as_a_wrapper(name):
    @hookimpl
    def function(self):
        yield

    refused(function, "@hookimpl(wrapper=True)", f"def {name}(self, run):", name=name)


@pytest.mark.parametrize("wrapper", [False, True])
def test_async_hookimpl(wrapper):
    @hookimpl(wrapper=wrapper)
    async def on_step_end(self): ...

    refused(on_step_end, "'async def'", "nothing would await it")


def test_async_wrapper_that_yields():
    @hookimpl(wrapper=True)
    async def forward(self):
        yield

    refused(forward, "'async def'", "nothing would await it")


def test_wrapper_that_does_not_yield():
    @hookimpl(wrapper=True)
    def barrier(self): ...

    refused(barrier, "yield", "def barrier(self, run):")


def test_wrapper_whose_decorator_hides_the_yield():
    def loud(function):
        return functools.wraps(function)(lambda *args: function(*args))

    @hookimpl(wrapper=True)
    @loud
    def barrier(self):
        yield

    refused(barrier, "yield")


def test_generator_may_own_a_hook_that_returns_an_iterator():
    class Strategy:
        @hookimpl
        def device_batches(self, loader):
            yield from loader

    hooks = hooks_of(strategy(Strategy()))
    assert list(hooks.device_batches(run=None, loader=[1, 2], stage="train")) == [1, 2]


def test_method_with_a_hooks_name_and_no_hookimpl():
    def on_step_end(self, run): ...

    refused(on_step_end, "@hookimpl")


def test_overriding_a_hook_without_hookimpl_is_refused_too():
    class Loud(Doubles):
        def all_gather(self):
            return (yield)

    with pytest.raises(UsageError, match=r"Loud.*all_gather.*@hookimpl"):
        hooks_of(Loud())


def test_data_and_imported_functions_may_have_a_hooks_name():
    module = types.ModuleType("my_hooks")
    module.step, module.forward = 3, sys.exit
    module.on_epoch_end = hookimpl(lambda: None)
    marked = {"on_epoch_end": hookimpl(lambda self: None)}
    hooks_of(
        module, type("Plugin", (), {"step": 3, "barrier": property(lambda self: 1), **marked})()
    )


@pytest.mark.parametrize("plugin", [3, None, object(), int])
def test_an_object_without_hookimpls_is_no_plugin(plugin):
    with pytest.raises(UsageError, match="nothing marked with @hookimpl"):
        hooks_of(part(plugin))


def test_function_of_a_module_with_a_hooks_name_and_no_hookimpl():
    module = types.ModuleType("my_hooks")
    exec("def on_step_end(run): ...", vars(module))
    with pytest.raises(UsageError, match=r"my_hooks.*on_step_end.*@hookimpl"):
        hooks_of(module)


@pytest.mark.parametrize("plugin", [Doubles(), owns(1, "on_step_end")])
def test_same_plugin_twice(plugin):
    with pytest.raises(UsageError, match="twice"):
        hooks_of(plugin, plugin)


def test_two_plugins_of_one_class_are_two_plugins():
    hooks = hooks_of(strategy(owns(1)), Doubles(), Doubles())
    assert gather(hooks) == 4


def test_replaces_as_a_string_is_refused():
    class Plugin:
        replaces = "optimizer_step"

        @hookimpl
        def optimizer_step(self, run, optimizer, closure): ...

    with pytest.raises(
        UsageError,
        match=r"acme\[Plugin\]: its replaces = 'optimizer_step' is a string. Fix: replaces = \{'",
    ):
        hooks_of(part(Plugin(), distribution="acme"))


def test_forgotten_self():
    @hookimpl
    def on_step_end(run): ...

    refused(
        on_step_end, "no 'self'", "would get the plugin as 'run'", "def on_step_end(self, run, ...)"
    )
    hooks_of(type("Plugin", (), {"on_step_end": staticmethod(on_step_end)})())
