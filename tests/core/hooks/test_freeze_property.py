"""A frozen hook does exactly as pluggy's caller: same result, same calls, same exception."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, strategies as st
from pluggy import HookCaller, PluginManager

from geartrain import GeartrainError, hookimpl, hookspecs
from geartrain.hooks.manager import Hooks

from ..contract_fixtures import part

SINGLE = {
    "forward": ("run", "method", "args"),
    "micro_step": ("run", "first", "last"),
    "optimizer_step": ("run", "optimizer", "closure"),
    "backward": ("run", "loss"),
    "barrier": ("run",),
    "plan_processes": ("request",),
}
EVERY = {
    "log_metrics": ("run", "metrics", "step"),
    "on_exception": ("run", "error"),
    "on_step_end": ("run",),
    "check_plan": ("plan", "module"),
}
ARGUMENTS = SINGLE | EVERY

#: The forms of a hookimpl: the line above its ``def``, and its first parameter.
FORMS = {
    "method": ("", "self"),
    "static": ("@staticmethod", ""),
    "class": ("@classmethod", "cls"),
    "positional": ("", "self"),
    "own_default": ("", "self"),
}


@dataclass(frozen=True)
class Impl:
    """One hookimpl: its arguments, their order, and its actions."""

    takes: tuple[str, ...]
    form: str = "method"
    #: ``"value"``, ``"none"``, ``"raise"`` or ``"stop"`` (StopIteration, special in generators).
    does: str = "value"
    #: A wrapper's action before its yield: ``""``, ``"raise"`` or ``"return"`` (it never yields).
    before: str | None = None
    #: A wrapper's action on the result: ``"pass"``, ``"change"``, ``"none"``, ``"raise"`` or
    #: ``"yield"`` (a second time).
    after: str = "pass"
    #: A wrapper's action on an exception: ``"pass"``, ``"swallow"``, ``"other"`` or ``"from"``.
    fails: str = "pass"

    @property
    def wrapper(self):
        return self.before is not None


class Deeds:
    """Records the hookimpls' actions. Values and exceptions are single objects, for ``is``."""

    def __init__(self):
        self.trace, self._made = [], {}

    def _one(self, key, make):
        return self._made.setdefault(key, make())

    def note(self, label, when, what):
        self.trace.append((label, when, what))

    def error(self, label, kind=ValueError):
        return self._one((label, kind), lambda: kind(label))

    def plain(self, label, impl, received):
        self.note(label, "called", received)
        if impl.does in ("raise", "stop"):
            raise self.error(label, StopIteration if impl.does == "stop" else ValueError)
        return None if impl.does == "none" else self._one((label, "value"), lambda: [label])

    def around(self, label, impl, received):
        self.note(label, "before", received)
        if impl.before == "raise":
            raise self.error(label)
        if impl.before == "return":
            return "never yielded"
        try:
            result = yield
        except Exception as error:
            self.note(label, "error", (type(error), str(error)))
            if impl.fails == "swallow":
                return self._one((label, "value"), lambda: [label])
            if impl.fails == "other":
                raise self.error(label, KeyError) from None
            if impl.fails == "from":
                raise self.error(label, KeyError) from error
            raise
        self.note(label, "after", result)
        if impl.after == "raise":
            raise self.error(label)
        if impl.after == "yield":
            yield
        return {"change": (label, result), "none": None}.get(impl.after, result)


def plugin(label, hook, impl, deeds):
    """Return an object whose hookimpl is real code with the parameters of ``impl``."""
    above, first = FORMS[impl.form]
    parameters = [*filter(None, [first]), *impl.takes]
    if impl.form == "positional":
        parameters.append("/")
    if impl.form == "own_default":
        parameters.append("mine='own'")
    received = "dict(" + ", ".join(f"{name}={name}" for name in impl.takes) + ")"
    body = (
        "return (yield from deeds.around(label, impl, {}))"
        if impl.wrapper
        else "return deeds.plain(label, impl, {})"
    )
    source = f"""
class Plugin:
    {above}
    @hookimpl(wrapper={impl.wrapper})
    def {hook}({", ".join(parameters)}):
        {body.format(received)}
"""
    space = {"hookimpl": hookimpl, "deeds": deeds, "label": label, "impl": impl}
    exec(source, space)
    return space["Plugin"]()


def takes(hook):
    """Draw any subset of the hook's arguments in any order."""
    return st.permutations(ARGUMENTS[hook]).flatmap(
        lambda names: st.integers(0, len(names)).map(lambda n: tuple(names[:n]))
    )


def plains(hook):
    deeds = (
        ["value", "raise", "stop"]
        if hook in ("plan_processes", "micro_step")
        else ["value", "none", "raise", "stop"]
    )  # they need one
    return st.builds(Impl, takes(hook), st.sampled_from(sorted(FORMS)), st.sampled_from(deeds))


def wrappers(hook):
    return st.builds(
        Impl,
        takes(hook),
        st.sampled_from(sorted(FORMS)),
        before=st.sampled_from(["", "", "", "raise", "return"]),
        after=st.sampled_from(["pass", "change", "none", "raise", "yield"]),
        fails=st.sampled_from(["pass", "swallow", "other", "from"]),
    )


def singles(hook):
    """Draw at most one owner and any number of wrappers, in any order of registration."""
    owner = st.lists(plains(hook), max_size=1)
    both = st.tuples(owner, st.lists(wrappers(hook), max_size=3)).flatmap(
        lambda two: st.permutations([*two[0], *two[1]])
    )
    return st.tuples(st.just(hook), both)


def every(hook):
    return st.tuples(st.just(hook), st.lists(st.one_of(plains(hook), wrappers(hook)), max_size=5))


def which(error):
    """Describe an exception: a hookimpl's by identity, a new one of the caller by its text."""
    return (
        (type(error), str(error))
        if type(error) is RuntimeError or isinstance(error, GeartrainError)
        else error
    )


def outcome(caller, deeds, arguments):
    """Call once; return the result or the exception, and the trace."""
    deeds.trace.clear()
    try:
        result = caller(**arguments)
    except BaseException as error:
        return ("raised", which(error), which(error.__cause__), error.__suppress_context__), list(
            deeds.trace
        )
    return ("returned", result), list(deeds.trace)


def hooks_of_impls(hook, impls):
    """Return hooks with these hookimpls, their deeds, arguments for a call, and the plugins."""
    deeds = Deeds()
    kind = "strategy" if hook in SINGLE else "plugin"
    plugins = [plugin(f"p{n}", hook, impl, deeds) for n, impl in enumerate(impls)]
    hooks = Hooks(
        [
            part(one, "plugin" if impl.wrapper else kind, f"p{n}")
            for n, (one, impl) in enumerate(zip(plugins, impls, strict=True))
        ]
    )
    return hooks, deeds, {name: object() for name in ARGUMENTS[hook]}, plugins


def any_hook():
    return st.sampled_from(sorted(ARGUMENTS)).flatmap(
        lambda hook: (singles if hook in SINGLE else every)(hook)
    )


@given(any_hook())
@example(("forward", [Impl(("method", "args", "run"), form="positional", does="none")]))
@example(("forward", [Impl(("run", "method", "args"), form="own_default")]))
@example(("barrier", [Impl((), does="stop"), Impl(("run",), before="", fails="swallow")]))
@example(("micro_step", [Impl((), before="", after="change"), Impl(())]))
@example(("barrier", [Impl((), before="", after="change")]))
@example(("log_metrics", [Impl(("step",)), Impl(("run",), does="none"), Impl((), before="")]))
@example(("on_step_end", [Impl(()), Impl((), does="raise"), Impl(())]))
def test_a_frozen_hook_is_called_as_before_the_freeze(case):
    hook, impls = case
    hooks, deeds, arguments, _ = hooks_of_impls(hook, impls)
    pluggys = getattr(hooks.manager.hook, hook)
    assert isinstance(pluggys, HookCaller)
    expected = outcome(pluggys, deeds, arguments)
    hooks.freeze()
    frozen = getattr(hooks, hook)
    assert isinstance(frozen, HookCaller) == any(impl.wrapper for impl in impls)
    for _ in range(2):
        assert outcome(frozen, deeds, arguments) == expected
        assert outcome(pluggys, deeds, arguments) == expected


@given(any_hook())
@example(
    ("forward", [Impl((), does="stop"), Impl((), before="", fails="from"), Impl((), before="")])
)
@example(
    ("on_step_end", [Impl(()), Impl((), before="raise"), Impl((), before="", fails="swallow")])
)
def test_wrappers_that_yield_once_and_keep_the_result_are_called_as_pluggy_calls_them(case):
    hook, impls = case
    impls = [
        replace(impl, after="pass") if impl.after in ("none", "yield") else impl for impl in impls
    ]
    impls = [replace(impl, before="") if impl.before == "return" else impl for impl in impls]
    hooks, deeds, arguments, plugins = hooks_of_impls(hook, impls)
    plain = PluginManager("geartrain")
    plain.add_hookspecs(hookspecs)
    for one in plugins:
        plain.register(one)
    assert outcome(getattr(hooks, hook), deeds, arguments) == outcome(
        getattr(plain.hook, hook), deeds, arguments
    )


@pytest.mark.parametrize("hook", sorted(ARGUMENTS))
def test_table_above_has_the_hooks_own_arguments(hook):
    hooks = Hooks([])
    assert getattr(hooks.manager.hook, hook).spec.argnames == ARGUMENTS[hook]
    assert hooks.is_single(hook) == (hook in SINGLE)
