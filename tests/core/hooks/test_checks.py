"""Wrong hookimpls are refused before anything starts; the error names the plugin and the fix."""

import functools
import sys
import textwrap
import types

import pytest

from geartrain import UsageError, hookimpl

from ..contract_fixtures import Doubles, dists as dists, gather, hooks_of, owns, part, strategy

#: A class's source below ``class Plugin:``, and words of the error.
REFUSED = {
    "unknown hook": ("@hookimpl\ndef on_step_ends(self): ...", ["'on_step_end'"]),
    "of another plugin": (
        "@hookimpl\ndef on_stalls(self, run): ...",
        ["hook of another plugin or strategy", "choose that one too"],
    ),
    "of a known strategy": (
        "@hookimpl\ndef reduce_bucket(self, run, bucket): ...",
        ["select geartrain-ddp[ddp] (--strategy ddp), which brings this hook"],
    ),
    "unknown argument": (
        "@hookimpl\ndef log_metrics(self, metric): ...",
        ["'metric'", "log_metrics(run, metrics, step)", "Did you mean 'metrics'?"],
    ),
    "keyword-only argument": (
        "@hookimpl\ndef on_step_end(self, *, run): ...",
        ["'run'", "keyword"],
    ),
    "star arguments": (
        "@hookimpl\ndef log_metrics(self, *args): ...",
        ["*args", "run, metrics, step"],
    ),
    "star keywords": (
        "@hookimpl\ndef log_metrics(self, **kwargs): ...",
        ["*kwargs", "run, metrics, step"],
    ),
    "default that shadows an argument": (
        "@hookimpl\ndef log_metrics(self, step=0): ...",
        ["'step'", "default"],
    ),
    "tryfirst": ("@hookimpl(tryfirst=True)\ndef on_step_end(self): ...", ["tryfirst"]),
    "trylast": ("@hookimpl(trylast=True)\ndef on_step_end(self): ...", ["trylast"]),
    "hookwrapper": (
        "@hookimpl(hookwrapper=True)\ndef barrier(self): yield",
        ["hookwrapper", "wrapper=True"],
    ),
    "generator that is no wrapper": (
        "@hookimpl\ndef barrier(self): yield",
        ["@hookimpl(wrapper=True)", "def barrier(self, run):"],
    ),
    "async": (
        "@hookimpl\nasync def on_step_end(self): ...",
        ["'async def'", "nothing would await it"],
    ),
    "async wrapper": ("@hookimpl(wrapper=True)\nasync def forward(self): yield", ["'async def'"]),
    "wrapper that does not yield": (
        "@hookimpl(wrapper=True)\ndef barrier(self): ...",
        ["yield", "def barrier(self, run):"],
    ),
    "wrapper whose decorator hides the yield": (
        "@hookimpl(wrapper=True)\n@loud\ndef barrier(self): yield",
        ["yield"],
    ),
    "no hookimpl": ("def on_step_end(self, run): ...", ["on_step_end", "@hookimpl"]),
    "forgotten self": (
        "@hookimpl\ndef on_step_end(run): ...",
        ["no 'self'", "would get the plugin as 'run'", "def on_step_end(self, run, ...)"],
    ),
    "replaces as text": (
        "replaces = 'barrier'\n@hookimpl\ndef barrier(self, run): ...",
        ["its replaces = 'barrier' is a string. Fix: replaces = {'"],
    ),
}


def loud(function):
    return functools.wraps(function)(lambda *args: function(*args))


@pytest.mark.parametrize("fault", REFUSED)
def test_a_wrong_hookimpl_is_refused(fault):
    source, words = REFUSED[fault]
    space = {"hookimpl": hookimpl, "loud": loud}
    exec("class Plugin:\n" + textwrap.indent(source, "    "), space)
    with pytest.raises(UsageError) as caught:
        hooks_of(part(space["Plugin"](), distribution="acme"))
    for word in ("acme[Plugin]", "Fix:", *words):
        assert word in str(caught.value)


def test_unknown_hook_that_is_optional_is_allowed():
    class Plugin:
        @hookimpl(optionalhook=True)
        def reduce_bucket(self, run, bucket): ...

    hooks_of(Plugin())


def test_default_of_an_argument_that_the_hook_does_not_have_is_allowed():
    class Plugin:
        @hookimpl
        def on_step_end(self, prefix="mine"):
            return prefix

    assert hooks_of(Plugin()).on_step_end(run=None) == ["mine"]


def test_generator_may_own_a_hook_that_returns_an_iterator():
    class Strategy:
        @hookimpl
        def device_batches(self, loader):
            yield from loader

    hooks = hooks_of(strategy(Strategy()))
    assert list(hooks.device_batches(run=None, loader=[1, 2], stage="train")) == [1, 2]


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


@pytest.mark.parametrize("plugin", [None, int])
def test_an_object_without_hookimpls_is_no_plugin(plugin):
    with pytest.raises(UsageError, match="nothing marked with @hookimpl"):
        hooks_of(part(plugin))


def test_function_of_a_module_with_a_hooks_name_and_no_hookimpl():
    module = types.ModuleType("my_hooks")
    exec("def on_step_end(run): ...", vars(module))
    with pytest.raises(UsageError, match=r"my_hooks.*on_step_end.*@hookimpl"):
        hooks_of(module)


def test_same_plugin_twice():
    plugin = Doubles()
    with pytest.raises(UsageError, match="twice"):
        hooks_of(plugin, plugin)


def test_two_plugins_of_one_class_are_two_plugins():
    hooks = hooks_of(strategy(owns(1)), Doubles(), Doubles())
    assert gather(hooks) == 4


def test_a_static_method_needs_no_self():
    @hookimpl
    def on_step_end(run): ...

    hooks_of(type("Plugin", (), {"on_step_end": staticmethod(on_step_end)})())
