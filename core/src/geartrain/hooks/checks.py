"""Check every hookimpl of a part, so that each is called, and with the right arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from pluggy import HookCaller, PluginManager

from geartrain import hookspecs
from geartrain.errors import UsageError, nearest
from geartrain.errors.known import HOOKS, KNOWN
from geartrain.hooks.plugin_info import LoadedPlugin
from geartrain.hooks.spelling import check_plugin_attributes


@dataclass(frozen=True, slots=True)
class Impl:
    """One marked attribute of a plugin."""

    attribute: str
    hook: str
    wrapper: bool


def check_part(
    part: LoadedPlugin, specs: Mapping[str, HookCaller], manager: PluginManager
) -> list[Impl]:
    """Check and return every hookimpl of a part.

    Raises:
        UsageError: one would never be called, or wrongly; ``replaces`` is wrong; or there is none.
    """
    impls = []
    for name in dir(part.plugin):
        opts = manager.parse_hookimpl_opts(part.plugin, name)
        if opts is not None:
            impl = Impl(name, opts.get("specname") or name, bool(opts["wrapper"]))
            _check_hookimpl(part, impl, opts, specs)
            impls.append(impl)
        elif name in specs and _looks_meant(part.plugin, name):
            message = "has a hook's name but no @hookimpl, so it would never be called"
            hint = "put @hookimpl above it (overriding a hook in a subclass needs it too)"
            wrong(part, name, message, f"{hint}, or rename it")
    if not part.info.is_core:
        check_plugin_attributes(part.plugin, part.info.kind, part.info.label, specs)
    for hook in sorted(hooks_replaced_by(part)):
        if hook not in {impl.hook for impl in impls}:
            message = "stands in 'replaces' but is not implemented"
            wrong(part, hook, message, "implement it or take it out")
        if hook in specs and not is_single(specs[hook]):
            message = "stands in 'replaces', but every implementation of it is called"
            wrong(part, hook, message, "take it out")
    if not impls and part.info.kind == "plugin" and own_hookspecs(part.plugin) is None:
        message = f"{part.info.label} has nothing marked with @hookimpl"
        raise UsageError(f"{message}, so it would do nothing. Fix: mark its hookimpls")
    return impls


def _check_hookimpl(
    part: LoadedPlugin, impl: Impl, opts: Any, specs: Mapping[str, HookCaller]
) -> None:
    name, hook = impl.attribute, impl.hook
    if hook not in specs:
        if opts["optionalhook"]:
            return
        brought = "If it is a hook of another plugin or strategy, choose that one too"
        hint = f"{nearest(hook, specs)} {brought}"
        if hook in HOOKS:
            kind, provider = HOOKS[hook]
            label = f"{KNOWN[kind, provider]}[{provider}]"
            hint = f"select {label} (--{kind} {provider}), which brings this hook"
        wrong(part, name, "implements no known hook", hint)
    for message, hint in _faults(part.plugin, impl, opts, specs[hook]):
        wrong(part, name, message, hint)


def _faults(plugin: Any, impl: Impl, opts: Any, caller: HookCaller) -> Iterator[tuple[str, str]]:
    """Yield each fault of an implementation of a known hook, and the fix."""
    if opts["tryfirst"] or opts["trylast"]:
        hint = "order is the order in which plugins are given; take it out"
        yield "asks for tryfirst or trylast", hint
    if opts["hookwrapper"]:
        hint = "write @hookimpl(wrapper=True) and return the result of the yield"
        yield "uses the old hookwrapper=True", hint
    function = getattr(plugin, impl.attribute)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        hint = "write 'def'; asyncio.run(...) inside it runs a coroutine"
        yield "is 'async def', and nothing would await it", hint
    yields = inspect.isgeneratorfunction(function)
    if impl.wrapper and not yields:
        yield "is marked wrapper=True but does not yield", wrapper_form(caller)
    if yields and not impl.wrapper and "Iterator" not in result_of(caller):
        yield "yields but is not marked as a wrapper", wrapper_form(caller)
    assert caller.spec is not None
    known = caller.spec.argnames
    if inspect.ismethod(function) and function.__self__ is plugin:
        first = next(iter(inspect.signature(function.__func__).parameters), None)
        if first in known:
            hint = f"def {impl.attribute}(self, {first}, ...)"
            yield f"has no 'self', and would get the plugin as {first!r}", hint
    for name, parameter in inspect.signature(function).parameters.items():
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.KEYWORD_ONLY:
            yield f"takes {name!r} by keyword only, which pluggy never passes", "take out the '*'"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            hint = f"name the arguments that it needs: {', '.join(known)}"
            yield f"takes '*{name}', which would always be empty", hint
        if name in known and has_default:
            message = f"gives {name!r} a default, which every call of the hook overrules"
            yield message, "take out the default"
        if name not in known and not has_default:
            hint = f"the hook is {impl.hook}({', '.join(known)}). {nearest(name, known)}"
            yield f"takes an argument {name!r} that the hook does not have", hint


def own_hookspecs(plugin: Any) -> ModuleType | None:
    """Return the module of hookspecs that a plugin brings, if it brings one."""
    module = getattr(plugin, "hookspecs", None)
    return None if module is hookspecs else module  # a plugin file may have imported core's


def is_single(caller: HookCaller) -> bool:
    """True if exactly one implementation of the hook answers."""
    return bool(caller.spec and caller.spec.opts["firstresult"])


def result_of(caller: HookCaller) -> str:
    """Return the annotation of a hook's result; ``"None"`` for an event."""
    spec = caller.spec
    return str(inspect.get_annotations(spec.function).get("return", "")) if spec else ""


def _looks_meant(plugin: Any, name: str) -> bool:
    """True if an unmarked attribute is a method, or a module's own function."""
    found = inspect.getattr_static(plugin, name, None)
    if not inspect.ismodule(plugin):
        return inspect.isroutine(found)
    return inspect.isroutine(found) and getattr(found, "__module__", "") == plugin.__name__


def hooks_replaced_by(part: LoadedPlugin) -> frozenset[str]:
    """Return a plugin's ``replaces``: the hooks whose owner it replaces.

    Raises:
        UsageError: it is a string.
    """
    named = getattr(part.plugin, "replaces", ())
    if isinstance(named, str):  # frozenset would make letters of it
        hint = f"replaces = {{{named!r}}}, a set of hooks"
        raise UsageError(f"{part.info.label}: its replaces = {named!r} is a string. Fix: {hint}")
    return frozenset(named)


def wrapper_form(caller: HookCaller) -> str:
    """Return how to write a wrapper of a hook."""
    assert caller.spec is not None
    return (
        "to do something around it, write\n"
        "    @hookimpl(wrapper=True)\n"
        f"    def {caller.name}(self, {', '.join(caller.spec.argnames)}):\n"
        "        result = yield   # the owner works here\n"
        "        return result"
    )


def wrong(part: LoadedPlugin, name: str, message: str, hint: str) -> NoReturn:
    """Raise the error of a hookimpl that cannot be right."""
    raise UsageError(f"{part.info.label}: its hookimpl {name!r} {message}. Fix: {hint}")
