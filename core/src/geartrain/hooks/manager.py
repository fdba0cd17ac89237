"""Register plugins, find the owner of each hook, and freeze the callers for the loop."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
from pluggy import HookCaller, HookImpl

from geartrain import hookspecs
from geartrain.errors import UsageError
from geartrain.errors.distributions import import_optional
from geartrain.hooks.checks import (
    check_part,
    hooks_replaced_by,
    is_single,
    own_hookspecs,
    wrapper_form,
    wrong,
)
from geartrain.hooks.isolation import guarded
from geartrain.hooks.plugin_info import LoadedPlugin, PluginInfo
from geartrain.hooks.results import require_result, unchecked
from geartrain.hooks.spelling import OF_PLUGINS

_PROJECT = "geartrain"
#: The kinds that may own a single hook, in order of precedence. A plugin needs ``replaces``.
_OWNERS = ("strategy", "accelerator", "precision", "core", "default")


class _Manager(pluggy.PluginManager):
    """pluggy's manager, without the plain hookimpls of single hooks that another part owns."""

    def __init__(self) -> None:
        super().__init__(_PROJECT)
        #: (plugin's id, attribute) of these hookimpls.
        self.passed_over: set[tuple[int, str]] = set()
        self._unwatched = self._inner_hookexec

    @property
    def is_watched(self) -> bool:
        """True while a monitor is on: then pluggy must execute every call, to report it."""
        return self._inner_hookexec is not self._unwatched

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if name.startswith("__"):  # every object has 26 special methods: parsing them costs 2 ms
            return None
        if (id(plugin), name) in self.passed_over:
            return None
        return super().parse_hookimpl_opts(plugin, name)


class Hooks:
    """The callers of all hooks, as attributes: ``hooks.barrier(run=run)``.

    Args:
        parts: in the order of registration: core's own, then accelerator, strategy and plugins.

    Raises:
        UsageError: a hookimpl is wrong, or two parts claim one hook.
    """

    #: Attributes that any plugin may have, besides its hooks.
    plugin_attributes = OF_PLUGINS

    def __init__(self, parts: Sequence[LoadedPlugin]) -> None:
        self._parts = tuple(parts)
        self._manager, self._frozen = _Manager(), False
        self._manager.add_hookspecs(hookspecs)
        self._own_hookspecs()
        attributes = vars(self._manager.hook).items()
        callers = {name: caller for name, caller in attributes if isinstance(caller, HookCaller)}
        in_order = [name for name in vars(hookspecs) if name in callers]  # pluggy sorts by name
        self._specs = {name: callers[name] for name in dict.fromkeys([*in_order, *callers])}
        self._impls = {id(p): check_part(p, self._specs, self._manager) for p in self._parts}
        self._owner_of = self._settle_owners()
        self._choice_of: dict[int, PluginInfo] = {}
        for part in self._parts:
            self._register(part)
        for hook, caller in self._specs.items():
            require_result(caller, hook in self._owner_of)
        vars(self).update(self._specs)

    def add(self, plugin: Any, info: PluginInfo) -> None:
        """Register a plugin of this process, after the run's parts, and before they are frozen.

        Raises:
            UsageError: the hooks are frozen.
        """
        self._refuse_if_frozen()
        self._choice_of[id(plugin)] = info
        self._manager.register(plugin, f"{info.label} of this process {id(plugin)}")

    def add_methods(self, methods: Mapping[str, Callable[..., Any]], info: PluginInfo) -> None:
        """Register functions as :meth:`add` does, by the names of a module's ``on_`` methods."""
        from geartrain.hooks.events import Events  # imports torch

        self.add(Events(methods), info)

    if TYPE_CHECKING:  # of the hooks that other plugins call
        shard_dataloader = staticmethod(hookspecs.shard_dataloader)
        wrap_model = staticmethod(hookspecs.wrap_model)
        wrap_optimizer = staticmethod(hookspecs.wrap_optimizer)
        clip_gradients = staticmethod(hookspecs.clip_gradients)
        optimizer_step = staticmethod(hookspecs.optimizer_step)
        log_sync = staticmethod(hookspecs.log_sync)
        all_gather = staticmethod(hookspecs.all_gather)
        broadcast = staticmethod(hookspecs.broadcast)
        barrier = staticmethod(hookspecs.barrier)
        model_state = staticmethod(hookspecs.model_state)

        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def has_hookimpls(thing: Any) -> bool:
        """True if a class, an object or a module has something marked with ``@hookimpl``."""
        found = (getattr(thing, name, None) for name in dir(thing))
        return any(inspect.isroutine(item) and hasattr(item, "geartrain_impl") for item in found)

    @property
    def names(self) -> list[str]:
        """Every hook's name, in the order of the hookspecs."""
        return list(self._specs)

    @property
    def parts(self) -> tuple[LoadedPlugin, ...]:
        """The run's parts, in the order of registration."""
        return self._parts

    @property
    def manager(self) -> pluggy.PluginManager:
        """pluggy's own manager, for monitoring and tracing before the hooks are frozen.

        Raises:
            UsageError: they are frozen.
        """
        self._refuse_if_frozen()
        return self._manager

    def _refuse_if_frozen(self) -> None:
        if self._frozen:
            raise UsageError(
                "the hooks are frozen once the run is set up, so a change of them would have no "
                "effect. Fix: change them before, in Trainer(plugins=[...]) or in a setup_device "
                "wrapper"
            )

    def is_single(self, hook: str) -> bool:
        """True if exactly one implementation of the hook answers."""
        return is_single(self._specs[hook])

    def _own_hookspecs(self) -> None:
        for part in self._parts:
            module = own_hookspecs(part.plugin)
            if module is None:
                continue
            mark, hook = f"{_PROJECT}_spec", self._manager.hook
            brought = [name for name in dir(module) if hasattr(getattr(module, name), mark)]
            taken = [name for name in brought if hasattr(Hooks, name) or hasattr(hook, name)]
            if taken or not brought:
                names = ", ".join(taken)
                message = f"redefine {names}" if taken else "have nothing marked with @hookspec"
                hint = "mark new hooks, with new names"
                raise UsageError(f"{part.info.label}: its hookspecs {message}. Fix: {hint}")
            self._manager.add_hookspecs(module)

    # --- owners -----------------------------------------------------------------------------------

    def _settle_owners(self) -> dict[str, LoadedPlugin]:
        owners: dict[str, LoadedPlugin] = {}
        for hook in filter(self.is_single, self._specs):
            plain = [part for part in self._parts if self._plain(part, hook)]
            ranked = [part for kind in _OWNERS for part in plain if part.info.kind == kind]
            others = [part for part in plain if part.info.kind not in _OWNERS]
            for part in others:
                if ranked and hook not in hooks_replaced_by(part):
                    owner = ranked[0].info.label
                    message = f"would silently switch off {hook} of {owner}, which owns it"
                    replace = f"Or, to replace the owner, say replaces = {{{hook!r}}} on the class."
                    wrong(part, hook, message, f"{wrapper_form(self._specs[hook])}\n{replace}")
            claims = others or ranked
            if len(claims) > 1 and claims[0].info.kind == claims[1].info.kind:
                both = f"{claims[0].info.label} and {claims[1].info.label}"
                message, hint = f"{both} both mean to own the hook {hook!r}", "choose one of them"
                raise UsageError(f"{message}. Fix: {hint}, or make one a wrapper.")
            if claims:
                owners[hook] = claims[0]
                for part in plain:
                    if part is not claims[0]:
                        losers = ((id(part.plugin), name) for name in self._plain(part, hook))
                        self._manager.passed_over.update(losers)
        for part in self._parts:
            for hook in sorted(getattr(part.plugin, "must_own", ())):
                if owners[hook] is not part:
                    owner = owners[hook].info.label
                    message = f"{part.info.label} must own the hook {hook!r}, and {owner} does"
                    raise UsageError(f"{message}. Fix: use one without the other")
        return owners

    def _plain(self, part: LoadedPlugin, hook: str) -> list[str]:
        """Return the attributes of a part that implement ``hook`` and are no wrappers."""
        impls = self._impls[id(part)]
        return [impl.attribute for impl in impls if impl.hook == hook and not impl.wrapper]

    def _register(self, part: LoadedPlugin) -> None:
        label, n = part.info.label, 1
        while self._manager.has_plugin(name := label if n == 1 else f"{label} ({n})"):
            n += 1
        plugin = part.plugin
        if getattr(plugin, "errors_are_warnings", False):
            plugin = guarded(part, self._impls[id(part)], self._specs)
        if any(other.plugin is part.plugin for other in self._parts[: self._parts.index(part)]):
            raise UsageError(f"{label}: the same plugin is given twice. Fix: give it once.")
        self._manager.register(plugin, name)
        self._choice_of[id(plugin)] = part.info

    # --- implementations --------------------------------------------------------------------------

    def owner(self, hook: str) -> PluginInfo | None:
        """Return the owner of a single hook; ``None`` for an all-hook, or if there is no owner."""
        part = self._owner_of.get(hook)
        return part.info if part else None

    def is_default(self, hook: str) -> bool:
        """True if core's default owns a single hook and nothing wraps it."""
        owner = self.owner(hook)
        return owner is not None and owner.kind == "default" and not self.wrappers(hook)

    def strategy_can(self, capability: str) -> bool:
        """True unless the strategy declares ``capabilities = {capability: False}``."""
        strategies = [part.plugin for part in self._parts if part.info.kind == "strategy"]
        declared = [getattr(strategy, "capabilities", None) for strategy in strategies]
        return all(can.get(capability, True) for can in declared if isinstance(can, Mapping))

    def wrappers(self, hook: str) -> list[PluginInfo]:
        """Return the parts that wrap a hook, outermost first."""
        impls = reversed(self._specs[hook].get_hookimpls())
        return [self._choice_of[id(impl.plugin)] for impl in impls if impl.wrapper]

    def implementers(self, hook: str) -> list[PluginInfo]:
        """Return every implementer in call order: wrappers, outermost first, then the others."""
        impls = reversed(self._specs[hook].get_hookimpls())
        return [self._choice_of[id(impl.plugin)] for impl in impls]

    def passed_over(self, hook: str) -> list[PluginInfo]:
        """Return the parts whose implementations of a single hook another owner replaces."""
        over, found = self._manager.passed_over, []
        for part in self._parts:
            if any((id(part.plugin), name) in over for name in self._plain(part, hook)):
                found.append(part.info)
        return found

    # --- freezing ---------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Make every caller as cheap as possible, and refuse any later change.

        pluggy's caller costs 1 to 2 µs a call, with ten calls in a step, which may take 150 µs. A
        hook without implementations becomes a function that does nothing. A hook without wrappers
        becomes its owner's function, or a loop over all functions. Hooks with wrappers keep
        pluggy's caller, and so do all hooks while monitoring is on.
        """
        if not self._manager.is_watched:
            for name, caller in self._specs.items():
                if getattr(self, name) is caller:  # otherwise replace_caller has replaced it
                    setattr(self, name, _frozen(caller, self.is_single(name)))
        self._frozen = True

    def replace_caller(self, hook: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Let ``answer`` answer a hook of this run; return the caller that it replaces."""
        caller: Callable[..., Any] = getattr(self, hook)
        setattr(self, hook, answer)
        return caller

    def implementations(self) -> list[tuple[str, HookImpl, PluginInfo | None]]:
        """Return each hook's implementations, with the part of each; ``None``: added by hand."""
        impls = ((hook, impl) for hook, c in self._specs.items() for impl in c.get_hookimpls())
        return [(hook, impl, self._choice_of.get(id(impl.plugin))) for hook, impl in impls]

    def explain(self, error: BaseException, notes: bool = True) -> None:
        """Let geartrain-callbacks shorten a traceback, and note the plugin that raised it."""
        if (errors := import_optional("geartrain_callbacks.errors")) is not None:
            errors.explain(error, self if notes else None)


def _no_owner(**_: Any) -> None:
    """Do nothing: a frozen single hook that nothing implements."""


def _no_event(
    run: Any = None,
    outputs: Any = None,
    batch: Any = None,
    batch_idx: Any = None,
    optimizer: Any = None,
    loss: Any = None,
) -> list[Any]:
    """Do nothing at an event of a batch, without the dict of ``**_``, which costs 0.2 µs."""
    return []


_OF_A_BATCH = frozenset(inspect.signature(_no_event).parameters)


def _frozen(caller: HookCaller, single: bool) -> Callable[..., Any]:
    impls = caller.get_hookimpls()
    assert caller.spec is not None
    if not impls and single:
        return _no_owner
    if not impls and _OF_A_BATCH.issuperset(caller.spec.argnames):
        return _no_event
    if not single and not any(impl.wrapper for impl in impls):
        return _each([_bare(impl, caller.spec.argnames) for impl in reversed(impls)])
    if not single or len(impls) > 1 or impls[0].wrapper:
        return caller
    return _bare(impls[0], caller.spec.argnames)


def _each(functions: Sequence[Callable[..., Any]]) -> Callable[..., list[Any]]:
    """Return a function that calls all of them and returns their results except ``None``."""

    def call(**arguments: Any) -> list[Any]:
        results = []
        for function in functions:
            result = function(**arguments)
            if result is not None:
                results.append(result)
        return results

    return call


def _bare(impl: HookImpl, argnames: Iterable[str]) -> Callable[..., Any]:
    """Return the implementation, or an adapter if it takes fewer arguments than the hook has."""
    function, wanted = unchecked(impl.function), impl.argnames
    parameters = inspect.signature(function).parameters.values()
    plain = (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    if {p.name for p in parameters} == set(argnames) and all(plain):
        return function

    if len(wanted) > 1:
        take = operator.itemgetter(*wanted)  # half the cost of a list
        return lambda **arguments: function(*take(arguments))

    def adapter(**arguments: Any) -> Any:
        return function(*[arguments[name] for name in wanted])

    return adapter
