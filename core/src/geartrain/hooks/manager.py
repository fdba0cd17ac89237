"""Register plugins, find the owner of each hook, and freeze the callers for the loop."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
from pluggy import HookCaller, HookImpl

from geartrain import hookspecs
from geartrain.errors import UsageError
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

_PROJECT = "geartrain"
#: The kinds that may own a single hook, first claim first. A plugin owns one only with ``replaces``.
_OWNERS = ("strategy", "accelerator", "precision", "core", "default")


class _Manager(pluggy.PluginManager):
    """pluggy's manager, which does not register hookimpls that did not become owners."""

    def __init__(self) -> None:
        super().__init__(_PROJECT)
        #: (plugin's id, attribute) of plain hookimpls that another owner was preferred to.
        self.passed_over: set[tuple[int, str]] = set()
        self._unwatched = self._inner_hookexec

    @property
    def is_watched(self) -> bool:
        """True while a monitor is on: then every call must go through pluggy, which reports it."""
        return self._inner_hookexec is not self._unwatched

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if (
            name.startswith("__") or (id(plugin), name) in self.passed_over
        ):  # every object has 26 special methods: looking costs 2 ms
            return None
        return super().parse_hookimpl_opts(plugin, name)


class Hooks:
    """Every hook's caller, as an attribute: ``hooks.barrier(run=run)``.

    Args:
        parts: core's own first, then accelerator, strategy and plugins, in the order in which they are registered.

    Raises:
        UsageError: a hookimpl that cannot be right, or a hook that two parts claim.
    """

    def __init__(self, parts: Sequence[LoadedPlugin]) -> None:
        self._parts = tuple(parts)
        self._manager, self._frozen = _Manager(), False
        self._manager.add_hookspecs(hookspecs)
        self._own_hookspecs()
        callers = {
            name: caller
            for name, caller in vars(self._manager.hook).items()
            if isinstance(caller, HookCaller)
        }
        in_order = [
            name for name in vars(hookspecs) if name in callers
        ]  # pluggy sorts them by name
        self._specs = {name: callers[name] for name in dict.fromkeys([*in_order, *callers])}
        self._impls = {
            id(part): check_part(part, self._specs, self._manager) for part in self._parts
        }
        self._owner_of = self._settle_owners()
        self._choice_of: dict[int, PluginInfo] = {}
        for part in self._parts:
            self._register(part)
        for hook, caller in self._specs.items():
            require_result(caller, hook in self._owner_of)
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
        """pluggy's own manager, for monitoring and tracing, until the hooks are frozen.

        Raises:
            UsageError: they are frozen.
        """
        if self._frozen:
            raise UsageError(
                "the hooks are frozen once the run is set up, so a change of them would have no effect. "
                "Fix: change them before, in Trainer(plugins=[...]) or in a setup_device wrapper"
            )
        return self._manager

    def is_single(self, hook: str) -> bool:
        """True if exactly one implementation of the hook answers."""
        return is_single(self._specs[hook])

    def _own_hookspecs(self) -> None:
        for part in self._parts:
            module = own_hookspecs(part.plugin)
            if module is None:
                continue
            brought = {
                name for name in dir(module) if hasattr(getattr(module, name), f"{_PROJECT}_spec")
            }
            taken = sorted(
                name
                for name in brought
                if hasattr(Hooks, name) or hasattr(self._manager.hook, name)
            )
            if taken or not brought:
                what = (
                    f"redefine {', '.join(taken)}"
                    if taken
                    else "have nothing marked with @hookspec"
                )
                raise UsageError(
                    f"{part.info.label}: its hookspecs {what}. Fix: mark new hooks, with new names"
                )
            self._manager.add_hookspecs(module)

    # --- owners ----------------------------------------------------------------------------------------------------------

    def _settle_owners(self) -> dict[str, LoadedPlugin]:
        owners: dict[str, LoadedPlugin] = {}
        for hook in filter(self.is_single, self._specs):
            plain = [part for part in self._parts if self._plain(part, hook)]
            ours = sorted(
                (p for p in plain if p.info.kind in _OWNERS),
                key=lambda p: _OWNERS.index(p.info.kind),
            )
            theirs = [part for part in plain if part.info.kind not in _OWNERS]
            for part in theirs:
                if ours and hook not in hooks_replaced_by(part):
                    wrong(
                        part,
                        hook,
                        f"would silently switch off {hook} of {ours[0].info.label}, which owns it",
                        f"{wrapper_form(self._specs[hook])}\nOr, to replace the owner, say replaces = {{{hook!r}}} on the class.",
                    )
            claims = theirs or ours
            if len(claims) > 1 and claims[0].info.kind == claims[1].info.kind:
                both = f"{claims[0].info.label} and {claims[1].info.label}"
                raise UsageError(
                    f"{both} both mean to own the hook {hook!r}. Fix: choose one of them, or make one a wrapper."
                )
            if claims:
                owners[hook] = claims[0]
                losers = [
                    (id(part.plugin), name)
                    for part in plain
                    if part is not claims[0]
                    for name in self._plain(part, hook)
                ]
                self._manager.passed_over.update(losers)
        for part in self._parts:
            for hook in sorted(getattr(part.plugin, "must_own", ())):
                if (owner := owners[hook]) is not part:
                    raise UsageError(
                        f"{part.info.label} must own the hook {hook!r}, and {owner.info.label} does. Fix: one without the other"
                    )
        return owners

    def _plain(self, part: LoadedPlugin, hook: str) -> list[str]:
        """Return the attributes of a part that implement ``hook`` and are no wrappers; ``specname=`` gives them other names."""
        return [
            impl.attribute
            for impl in self._impls[id(part)]
            if impl.hook == hook and not impl.wrapper
        ]

    def _register(self, part: LoadedPlugin) -> None:
        label, n = part.info.label, 1
        while self._manager.has_plugin(name := label if n == 1 else f"{label} ({n})"):
            n += 1
        plugin = (
            guarded(part, self._impls[id(part)], self._specs)
            if getattr(part.plugin, "errors_are_warnings", False)
            else part.plugin
        )
        if any(other.plugin is part.plugin for other in self._parts[: self._parts.index(part)]):
            raise UsageError(f"{label}: the same plugin is given twice. Fix: give it once.")
        self._manager.register(plugin, name)
        self._choice_of[id(plugin)] = part.info

    # --- implementations ----------------------------------------------------------------------------------------------------

    def owner(self, hook: str) -> PluginInfo | None:
        """Return the owner of a single hook; ``None`` for an all-hook and for a hook without implementations."""
        part = self._owner_of.get(hook)
        return part.info if part else None

    def is_default(self, hook: str) -> bool:
        """True if core's default owns a single hook and nothing wraps it."""
        owner = self.owner(hook)
        return owner is not None and owner.kind == "default" and not self.wrappers(hook)

    def wrappers(self, hook: str) -> list[PluginInfo]:
        """Return the parts that wrap a hook, outermost first."""
        return [
            self._choice_of[id(impl.plugin)]
            for impl in reversed(self._specs[hook].get_hookimpls())
            if impl.wrapper
        ]

    def implementers(self, hook: str) -> list[PluginInfo]:
        """Return every implementer in call order: wrappers, outermost first, then plain implementations."""
        impls = reversed(self._specs[hook].get_hookimpls())
        return [self._choice_of[id(impl.plugin)] for impl in impls]

    def passed_over(self, hook: str) -> list[PluginInfo]:
        """Return the parts that implement a single hook and are not called, because another part owns it."""
        over = self._manager.passed_over
        return [
            part.info
            for part in self._parts
            if any((id(part.plugin), name) in over for name in self._plain(part, hook))
        ]

    # --- freezing --------------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Make every caller as cheap as its meaning allows; refuse any change from now on.

        pluggy's own caller costs 1 to 2 µs a call, ten calls make a step, and a step may be 150 µs. A hook that nothing implements
        becomes a function that does nothing, a single hook without a wrapper its owner's bare function, and such an all-hook a loop
        over its bare functions. Everything else stays pluggy's caller, and so does everything while monitoring is on.
        """
        if not self._manager.is_watched:
            for name, caller in self._specs.items():
                setattr(self, name, _frozen(caller, self.is_single(name)))
        self._frozen = True

    def blame(self, error: BaseException) -> None:
        """Add a note to ``error`` that names the plugin whose hookimpl raised it; neither core's own nor one that called the user's
        module, which raised, are named."""
        from geartrain.module.module import Module  # not above: planning needs no torch

        impls: dict[Any, list[tuple[HookImpl, str]]] = {}
        for hook, caller in self._specs.items():
            for impl in caller.get_hookimpls():
                impls.setdefault(
                    getattr(inspect.unwrap(impl.function), "__code__", None), []
                ).append((impl, hook))
        # The innermost frame that belongs to a hookimpl is the one that raised; those around it only passed it on.
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            if frame.f_code not in impls:
                if isinstance(frame.f_locals.get("self"), Module):
                    return
                continue
            # Two plugins may have inherited one function: then the frame's object identifies the caller.
            bound = [
                found
                for found in impls[frame.f_code]
                if any(found[0].plugin is value for value in frame.f_locals.values())
            ]
            impl, hook = (bound or impls[frame.f_code])[0]
            choice = self._choice_of.get(id(impl.plugin))
            if choice is None:
                error.add_note(
                    f"raised in hook {hook!r} of {impl.plugin_name}, which was registered by hand"
                )
            elif not choice.is_core:
                error.add_note(f"raised in hook {hook!r} of {choice.label}")
            return


def _no_owner(**_: Any) -> None:
    """Do nothing: a frozen single hook that nothing implements."""


def _no_implementation(**_: Any) -> list[Any]:
    """Do nothing: a frozen all-hook that nothing implements."""
    return []


def _frozen(caller: HookCaller, single: bool) -> Callable[..., Any]:
    impls = caller.get_hookimpls()
    if not impls:
        return _no_owner if single else _no_implementation
    assert caller.spec is not None
    if not single and not any(impl.wrapper for impl in impls):
        return _each([_bare(impl, caller.spec.argnames) for impl in reversed(impls)])
    if not single or len(impls) > 1 or impls[0].wrapper:
        return caller
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
    function, wanted = unchecked(impl.function), impl.argnames
    parameters = inspect.signature(function).parameters.values()
    if {p.name for p in parameters} == set(argnames) and all(
        p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters
    ):
        return function

    def adapter(**arguments: Any) -> Any:
        return function(*[arguments[name] for name in wanted])

    return adapter
