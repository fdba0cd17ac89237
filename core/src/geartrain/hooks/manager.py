"""Register plugins, settle who owns each hook, check every hookimpl, freeze the callers for the loop."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pluggy
from pluggy import HookCaller, HookImpl

from geartrain import hookspecs
from geartrain.errors import GeartrainError, TrainingError, UsageError, nearest
from geartrain.hooks.isolation import guarded
from geartrain.hooks.plugin_info import LoadedPlugin, PluginInfo
from geartrain.hooks.spelling import refuse_misspelt_of_plugin

_F = TypeVar("_F", bound=Callable[..., Any])

_PROJECT = "geartrain"
#: Who may own a single hook, first claim first. Plugins own one only where they say ``replaces``.
_OWNERS = ("strategy", "accelerator", "precision", "core", "default")


def fire(caller: Callable[..., Any] | None, **arguments: Any) -> list[Any]:
    """Call an all-hook that may be frozen to ``None``. For events; the loop writes its ``None`` check out."""
    return [] if caller is None else list(caller(**arguments) or ())  # a wrapper of an event may return nothing


class _Manager(pluggy.PluginManager):
    """pluggy's manager, closed once the hooks are frozen, and deaf to hookimpls that did not become owners."""

    def __init__(self) -> None:
        super().__init__(_PROJECT)
        self.frozen = False
        #: How many monitors are on: then every call must go through pluggy, which tells them.
        self.watchers = 0
        #: (plugin's id, attribute) of plain hookimpls that another owner was preferred to.
        self.passed_over: set[tuple[int, str]] = set()
        #: Hook -> how to wrap it, for each hook with a result: no wrapper may lose it.
        self.wrapper_forms: dict[str, str] = {}
        #: Hook -> what its owner must return, for each single hook that cannot do without it.
        self.required: dict[str, str] = {}
        self._inner_hookexec = self._call  # type: ignore[assignment]  # pluggy calls it by position

    def _call(self, hook: str, impls: Sequence[HookImpl], arguments: Mapping[str, object], firstresult: bool) -> Any:
        """Call what pluggy calls, in its order and with its treatment of errors. Also refuse a wrapper that loses the result."""
        results: list[Any] = []
        error: BaseException | None = None
        around: list[tuple[HookImpl, Any]] = []
        try:
            for impl in reversed(impls):
                answer: Any = impl.function(*[arguments[name] for name in impl.argnames])
                if impl.wrapper:
                    if next(answer, _NEVER) is _NEVER:
                        raise RuntimeError(f"{impl.plugin_name}: its wrapper of the hook {hook!r} did not yield")
                    around.append((impl, answer))
                elif answer is not None:
                    results.append(answer)
                    if firstresult:
                        break
        except BaseException as raised:
            error = raised
        result: Any = (results[0] if results else None) if firstresult else results
        if result is None and error is None and hook in self.required:
            error = _lost(hook, f"{impls[0].plugin_name}: its hookimpl {hook!r} returned None", f"return {self.required[hook]}")
        for impl, generator in reversed(around):
            before, failed = result, error
            try:
                generator.send(result) if failed is None else generator.throw(failed)
                error = RuntimeError(f"{impl.plugin_name}: its wrapper of the hook {hook!r} yielded twice")
                generator.close()
            except StopIteration as end:
                result, error = end.value, None
                if result is None and before is not None and failed is None and hook in self.wrapper_forms:
                    what = f"{impl.plugin_name}: its wrapper of the hook {hook!r} made None of the owner's {type(before).__name__}"
                    error = _lost(hook, what, self.wrapper_forms[hook])
            except BaseException as raised:
                # A generator cannot raise StopIteration: Python puts a RuntimeError around it.
                only_around = isinstance(failed, StopIteration) and isinstance(raised, RuntimeError) and raised.__cause__ is failed
                error = failed if only_around else raised
        if error is not None:
            raise error
        return result

    def _refuse_late(self, what: str) -> None:
        if self.frozen:
            raise UsageError(
                f"the hooks are frozen once the run is set up, so {what} would have no effect. "
                "Do it before: in Trainer(plugins=[...]) or in a setup_device wrapper."
            )

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if name.startswith("__") or (id(plugin), name) in self.passed_over:  # every object has 26 special methods: looking costs 2 ms
            return None
        return super().parse_hookimpl_opts(plugin, name)

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        self._refuse_late(f"registering {name or plugin!r}")
        return super().register(plugin, name)

    def unregister(self, plugin: Any = None, name: str | None = None) -> Any:
        self._refuse_late(f"unregistering {name or plugin!r}")
        return super().unregister(plugin, name)

    def add_hookspecs(self, module_or_class: Any) -> None:
        self._refuse_late("adding hookspecs")
        super().add_hookspecs(module_or_class)

    def add_hookcall_monitoring(self, before: Any, after: Any) -> Callable[[], None]:
        self._refuse_late("monitoring hook calls")
        undo = super().add_hookcall_monitoring(before, after)
        self.watchers += 1

        def stop() -> None:
            undo()
            self.watchers -= 1

        return stop


#: What a generator that never yields gives in place of its yield.
_NEVER = object()


def _lost(hook: str, what: str, fix: str) -> GeartrainError:
    return (UsageError if hook == "plan_processes" else TrainingError)(f"{what}. Fix: {fix}")


@dataclass(frozen=True, slots=True)
class _Impl:
    """One marked attribute of a plugin."""

    attribute: str
    hook: str
    wrapper: bool


class Hooks:
    """Every hook's caller, as an attribute: ``hooks.barrier(run=run)``.

    Args:
        parts: core's own first, then accelerator, strategy and plugins, in the order in which they are registered.

    Raises:
        UsageError: a hookimpl that cannot be right, or a hook that two parts claim.
    """

    def __init__(self, parts: Sequence[LoadedPlugin]) -> None:
        self._parts = tuple(parts)
        self._manager = _Manager()
        self._manager.add_hookspecs(hookspecs)
        self._own_hookspecs()
        callers = {name: caller for name, caller in vars(self._manager.hook).items() if isinstance(caller, HookCaller)}
        in_order = [name for name in vars(hookspecs) if name in callers]  # pluggy sorts them by name
        self._specs = {name: callers[name] for name in dict.fromkeys([*in_order, *callers])}
        self._impls = {id(part): self._check_part(part) for part in self._parts}
        self._owner_of = self._settle_owners()
        for hook, caller in self._specs.items():
            if (returns := self._returns(hook)) != "None":
                self._manager.wrapper_forms[hook] = _wrapper_form(caller)
            if hook in self._owner_of and returns and "None" not in returns and returns != "Any":
                self._manager.required[hook] = returns
        self._choice_of: dict[int, PluginInfo] = {}
        for part in self._parts:
            self._register(part)
        vars(self).update(self._specs)

    if TYPE_CHECKING:  # at run time a __getattr__ would slow every hook call down: CPython specialises plain attributes only

        def __getattr__(self, name: str) -> Any: ...

    @property
    def names(self) -> list[str]:
        """Every hook's name, in the order of the hookspecs."""
        return list(self._specs)

    @property
    def parts(self) -> tuple[LoadedPlugin, ...]:
        """The run's parts, in the order in which they are registered."""
        return self._parts

    @property
    def manager(self) -> pluggy.PluginManager:
        """pluggy's own manager, for monitoring and tracing."""
        return self._manager

    def is_single(self, hook: str) -> bool:
        spec = self._specs[hook].spec
        return bool(spec and spec.opts["firstresult"])

    def _returns(self, hook: str) -> str:
        """The annotation of a hook's result; ``"None"`` for an event."""
        spec = self._specs[hook].spec
        return str(inspect.get_annotations(spec.function).get("return", "")) if spec else ""

    # --- checks ----------------------------------------------------------------------------------------------------------

    def _own_hookspecs(self) -> None:
        for part in self._parts:
            module = getattr(part.plugin, "hookspecs", None)
            if module is None or module is hookspecs:  # a plugin file may have imported core's
                continue
            brought = {name for name in dir(module) if hasattr(getattr(module, name), f"{_PROJECT}_spec")}
            taken = sorted(name for name in brought if hasattr(Hooks, name) or hasattr(self._manager.hook, name))
            if taken or not brought:
                what = f"redefine {', '.join(taken)}" if taken else "have nothing marked with @hookspec"
                raise UsageError(f"{part.info.label}: its hookspecs {what}. Fix: mark hooks of its own, with names of their own")
            self._manager.add_hookspecs(module)

    def _check_part(self, part: LoadedPlugin) -> list[_Impl]:
        """Check every hookimpl of a part."""
        impls = []
        for name in dir(part.plugin):
            opts = self._manager.parse_hookimpl_opts(part.plugin, name)
            if opts is not None:
                impl = _Impl(name, opts.get("specname") or name, bool(opts["wrapper"]))
                self._check_hookimpl(part, impl, opts)
                impls.append(impl)
            elif name in self._specs and _looks_meant(part.plugin, name):
                _wrong(
                    part,
                    name,
                    "has a hook's name but no @hookimpl, so it would never be called",
                    "put @hookimpl above it (overriding a hook in a subclass needs it too), or rename it",
                )
        if not part.info.is_core:
            refuse_misspelt_of_plugin(part.plugin, part.info.kind, part.info.label, self._specs)
        for hook in sorted(_replaces(part)):
            if hook not in {impl.hook for impl in impls}:
                _wrong(part, hook, "stands in 'replaces' but is not implemented", "implement it or take it out")
            if hook in self._specs and not self.is_single(hook):
                _wrong(part, hook, "stands in 'replaces', but every implementation of it is called", "take it out")
        if not impls and part.info.kind == "plugin":
            raise UsageError(f"{part.info.label} has nothing marked with @hookimpl, so it would do nothing. Fix: mark what it should do")
        return impls

    def _check_hookimpl(self, part: LoadedPlugin, impl: _Impl, opts: Any) -> None:
        name, hook = impl.attribute, impl.hook
        if hook not in self._specs:
            if opts["optionalhook"]:
                return
            brought = "If it is a hook of another plugin or strategy (reduce_bucket is ddp's), choose that one too"
            _wrong(part, name, "implements no known hook", f"{nearest(hook, self._specs)} {brought}")
        if opts["tryfirst"] or opts["trylast"]:
            _wrong(part, name, "asks for tryfirst or trylast", "order is the order in which plugins are given; take it out")
        if opts["hookwrapper"]:
            _wrong(part, name, "uses the old hookwrapper=True", "write @hookimpl(wrapper=True) and return the result of the yield")
        function = getattr(part.plugin, name)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            _wrong(part, name, "is 'async def', and nothing would await it", "write 'def'; asyncio.run(...) inside it runs a coroutine")
        if opts["wrapper"] and not inspect.isgeneratorfunction(function):
            _wrong(part, name, "is marked wrapper=True but does not yield", _wrapper_form(self._specs[hook]))
        if inspect.isgeneratorfunction(function) and not opts["wrapper"] and "Iterator" not in self._returns(hook):
            _wrong(part, name, "yields but is not marked as a wrapper", _wrapper_form(self._specs[hook]))
        spec = self._specs[hook].spec
        assert spec is not None
        if inspect.ismethod(function) and function.__self__ is part.plugin:
            first = next(iter(inspect.signature(function.__func__).parameters), None)
            if first in spec.argnames:
                _wrong(part, name, f"has no 'self', and would get the plugin as {first!r}", f"def {name}(self, {first}, ...)")
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                _wrong(part, name, f"takes {parameter.name!r} by keyword only, which pluggy never passes", "take out the '*'")
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                _wrong(
                    part,
                    name,
                    f"takes '*{parameter.name}', which would always be empty",
                    f"name what it needs of: {', '.join(spec.argnames)}",
                )
            if parameter.name in spec.argnames and parameter.default is not parameter.empty:
                _wrong(part, name, f"gives {parameter.name!r} a default, which every call of the hook overrules", "take out the default")
            if parameter.name not in spec.argnames and parameter.default is parameter.empty:
                _wrong(
                    part,
                    name,
                    f"takes an argument {parameter.name!r} that the hook does not have",
                    f"the hook is {hook}({', '.join(spec.argnames)}). {nearest(parameter.name, spec.argnames)}",
                )

    # --- owners ----------------------------------------------------------------------------------------------------------

    def _settle_owners(self) -> dict[str, LoadedPlugin]:
        owners: dict[str, LoadedPlugin] = {}
        for hook in filter(self.is_single, self._specs):
            plain = [part for part in self._parts if self._plain(part, hook)]
            ours = sorted((p for p in plain if p.info.kind in _OWNERS), key=lambda p: _OWNERS.index(p.info.kind))
            theirs = [part for part in plain if part.info.kind not in _OWNERS]
            for part in theirs:
                if ours and hook not in _replaces(part):
                    _wrong(
                        part,
                        hook,
                        f"would silently switch off {hook} of {ours[0].info.label}, which owns it",
                        f"{_wrapper_form(self._specs[hook])}\nOr, to replace the owner, say replaces = {{{hook!r}}} on the class.",
                    )
            claims = theirs or ours
            if len(claims) > 1 and claims[0].info.kind == claims[1].info.kind:
                both = f"{claims[0].info.label} and {claims[1].info.label}"
                raise UsageError(f"{both} both mean to own the hook {hook!r}. Fix: choose one of them, or make one a wrapper.")
            if claims:
                owners[hook] = claims[0]
                losers = [(id(part.plugin), name) for part in plain if part is not claims[0] for name in self._plain(part, hook)]
                self._manager.passed_over.update(losers)
        for part in self._parts:
            for hook in sorted(getattr(part.plugin, "must_own", ())):
                if (owner := owners[hook]) is not part:
                    raise UsageError(
                        f"{part.info.label} must own the hook {hook!r}, and {owner.info.label} does. Fix: one without the other"
                    )
        return owners

    def _plain(self, part: LoadedPlugin, hook: str) -> list[str]:
        """The attributes of a part that implement ``hook`` and are no wrappers; ``specname=`` lets them have other names."""
        return [impl.attribute for impl in self._impls[id(part)] if impl.hook == hook and not impl.wrapper]

    def _register(self, part: LoadedPlugin) -> None:
        label, n = part.info.label, 1
        while self._manager.has_plugin(name := label if n == 1 else f"{label} ({n})"):
            n += 1
        plugin = self._guarded(part) if getattr(part.plugin, "errors_are_warnings", False) else part.plugin
        if any(other.plugin is part.plugin for other in self._parts[: self._parts.index(part)]):
            raise UsageError(f"{label}: the same plugin is given twice. Fix: give it once.")
        self._manager.register(plugin, name)
        self._choice_of[id(plugin)] = part.info

    def _guarded(self, part: LoadedPlugin) -> Any:
        """A harmless plugin with its errors let go where they can be: nobody waits for the result, or a wrapper hands it on, and the run
        has begun."""
        impls = self._impls[id(part)]
        stays = [i.attribute for i in impls if i.hook in ("check_plan", "plan_processes") or (self.is_single(i.hook) and not i.wrapper)]
        hooks = {i.attribute: None if i.attribute in stays else i.hook for i in impls}
        return guarded(part, hooks, [i.attribute for i in impls if i.wrapper])

    # --- what explain shows ----------------------------------------------------------------------------------------------

    def owner(self, hook: str) -> PluginInfo | None:
        """Who owns a single hook; ``None`` for an all-hook and for one that nobody implements."""
        part = self._owner_of.get(hook)
        return part.info if part else None

    def wrappers(self, hook: str) -> list[PluginInfo]:
        """Who wraps a hook, outermost first."""
        return [self._choice_of[id(impl.plugin)] for impl in reversed(self._specs[hook].get_hookimpls()) if impl.wrapper]

    def implementers(self, hook: str) -> list[PluginInfo]:
        """Every implementer in call order: wrappers, outermost first, then the plain ones."""
        impls = reversed(self._specs[hook].get_hookimpls())
        return [self._choice_of[id(impl.plugin)] for impl in impls]

    def passed_over(self, hook: str) -> list[PluginInfo]:
        """Who implements a single hook but is not asked, because another owns it."""
        over = self._manager.passed_over
        return [part.info for part in self._parts if any((id(part.plugin), name) in over for name in self._plain(part, hook))]

    # --- freezing --------------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Make every caller as cheap as its meaning allows; refuse any change from now on.

        pluggy's own caller costs 1 to 2 µs a call, ten calls make a step, and a step may be 150 µs. An all-hook that nobody
        implements becomes ``None``, and so does a single hook whose default does nothing; a single hook with no wrapper becomes
        its owner's bare function, and such an all-hook a loop over its bare functions. Everything else stays pluggy's caller, and so does
        everything while monitoring is on.
        """
        if not self._manager.watchers:
            for name, caller in self._specs.items():
                setattr(self, name, _frozen(caller, self.is_single(name)))
        self._manager.frozen = True

    def blame(self, error: BaseException) -> None:
        """Add a note to ``error`` that names the plugin whose hookimpl raised it; neither core's own nor one that called the user's
        module, which raised, are named."""
        from geartrain.module.module import Module  # not above: planning needs no torch

        impls: dict[Any, list[tuple[HookImpl, str]]] = {}
        for hook, caller in self._specs.items():
            for impl in caller.get_hookimpls():
                impls.setdefault(getattr(inspect.unwrap(impl.function), "__code__", None), []).append((impl, hook))
        # The innermost frame that belongs to a hookimpl is the one that raised; those around it only passed it on.
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            if frame.f_code not in impls:
                if isinstance(frame.f_locals.get("self"), Module):
                    return
                continue
            # Two plugins may have inherited one function: then the frame's own object tells whose call it was.
            bound = [found for found in impls[frame.f_code] if any(found[0].plugin is value for value in frame.f_locals.values())]
            impl, hook = (bound or impls[frame.f_code])[0]
            choice = self._choice_of.get(id(impl.plugin))
            if choice is None:
                error.add_note(f"raised in hook {hook!r} of {impl.plugin_name}, which was registered by hand")
            elif not choice.is_core:
                error.add_note(f"raised in hook {hook!r} of {choice.label}")
            return


def does_nothing(function: _F) -> _F:
    """Mark a default that does nothing: where it owns a hook and nothing wraps it, the loop need not call it."""
    function.does_nothing = True  # type: ignore[attr-defined]
    return function


def _frozen(caller: HookCaller, single: bool) -> Callable[..., Any] | None:
    impls = caller.get_hookimpls()
    if not impls:
        return None
    assert caller.spec is not None
    if not single and not any(impl.wrapper for impl in impls):
        return _each([_bare(impl, caller.spec.argnames) for impl in reversed(impls)])
    if not single or len(impls) > 1 or impls[0].wrapper:
        return caller
    if getattr(impls[0].function, "does_nothing", False):
        return None
    return _bare(impls[0], caller.spec.argnames)


def _each(functions: Sequence[Callable[..., Any]]) -> Callable[..., list[Any]]:
    """Call all of them; their results but for ``None``."""

    def call(**arguments: Any) -> list[Any]:
        results = []
        for function in functions:
            result = function(**arguments)
            if result is not None:
                results.append(result)
        return results

    return call


def _bare(impl: HookImpl, argnames: Iterable[str]) -> Callable[..., Any]:
    """The implementation itself, or the thinnest adapter where it takes fewer arguments than the hook has."""
    parameters = inspect.signature(impl.function).parameters.values()
    if {p.name for p in parameters} == set(argnames) and all(
        p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters
    ):
        return impl.function
    function, wanted = impl.function, impl.argnames

    def adapter(**arguments: Any) -> Any:
        return function(*[arguments[name] for name in wanted])

    return adapter


def _looks_meant(plugin: Any, name: str) -> bool:
    """Whether an unmarked attribute with a hook's name was meant as one: a method, or a module's own function."""
    found = inspect.getattr_static(plugin, name, None)
    return inspect.isroutine(found) and (not inspect.ismodule(plugin) or getattr(found, "__module__", "") == plugin.__name__)


def _replaces(part: LoadedPlugin) -> frozenset[str]:
    named = getattr(part.plugin, "replaces", ())
    if isinstance(named, str):  # a set of its letters otherwise
        raise UsageError(f"{part.info.label}: its replaces = {named!r} is a string. Fix: replaces = {{{named!r}}}, a set of hooks")
    return frozenset(named)


def _wrapper_form(caller: HookCaller) -> str:
    assert caller.spec is not None
    return (
        "to do something around it, write\n"
        "    @hookimpl(wrapper=True)\n"
        f"    def {caller.name}(self, {', '.join(caller.spec.argnames)}):\n"
        "        result = yield   # the owner works here\n"
        "        return result"
    )


def _wrong(part: LoadedPlugin, name: str, what: str, fix: str) -> NoReturn:
    raise UsageError(f"{part.info.label}: its hookimpl {name!r} {what}. Fix: {fix}")
