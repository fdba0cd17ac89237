"""Check hookimpls against their hooks when mypy runs.

Enable it in ``pyproject.toml``::

    [tool.mypy]
    plugins = ["geartrain_testing.mypy_plugin"]

mypy then reports a hookimpl whose name is nearly that of a hook, an argument that its hook does not
have, and annotations that do not fit those of ``geartrain.hookspecs``.
See https://mypy.readthedocs.io/en/stable/extending_mypy.html.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import cast

from mypy.checker import TypeChecker
from mypy.nodes import Decorator, FuncDef
from mypy.plugin import MethodContext, Plugin
from mypy.subtypes import is_subtype
from mypy.types import CallableType, Type, get_proper_type


class HookimplPlugin(Plugin):
    """Checks each function that ``@hookimpl`` or ``@hookimpl(wrapper=True)`` decorates."""

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        """Return the check for a call of pluggy's marker."""
        marker = fullname.startswith("pluggy.") and fullname.endswith(".HookimplMarker.__call__")
        return _check if marker else None


def _check(context: MethodContext) -> Type:
    names = [name for formal in context.arg_names for name in formal]
    if not context.arg_types[0]:  # @hookimpl(wrapper=True): mypy asks again for the function
        other = {"specname", "optionalhook"} & set(names)
        return context.default_return_type if other else context.type
    function = get_proper_type(context.arg_types[0][0])
    if isinstance(function, CallableType) and isinstance(function.definition, FuncDef):
        _check_function(context, function, function.definition)
    return context.default_return_type


def _check_function(context: MethodContext, function: CallableType, definition: FuncDef) -> None:
    hooks = _hooks(cast(TypeChecker, context.api))
    name = definition.name
    if name not in hooks:
        for near in get_close_matches(name, hooks, 1, 0.8):
            context.api.fail(f'"{name}" is no hook; did you mean "{near}"?', context.context)
        return
    hook = hooks[name]
    wanted = dict(zip(hook.arg_names, hook.arg_types, strict=True))
    given = list(zip(function.arg_names, function.arg_types, strict=True))
    for argument, kind in given[definition.has_self_or_cls_argument :]:
        if argument not in wanted:
            message = f'Hook "{name}" has no argument "{argument}"; it has {_joined(wanted)}'
            context.api.fail(message, context.context)
        elif not is_subtype(wanted[argument], kind):
            message = f'Argument "{argument}" of hook "{name}" is {{}}, not {{}}'
            _fail(context, message, wanted[argument], kind)
    if not definition.is_generator and not is_subtype(function.ret_type, hook.ret_type):
        message = f'Hook "{name}" returns {{}}, not {{}}'
        _fail(context, message, hook.ret_type, function.ret_type)


def _hooks(checker: TypeChecker) -> dict[str, CallableType]:
    """Return the signatures of the hooks, by name; none in a program without geartrain."""
    module = checker.modules.get("geartrain.hookspecs")
    names = module.names if module else {}
    functions = {
        name: symbol.node.func.type
        for name, symbol in names.items()
        if isinstance(symbol.node, Decorator)
    }
    return {name: kind for name, kind in functions.items() if isinstance(kind, CallableType)}


def _joined(names: dict[str | None, Type]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _fail(context: MethodContext, message: str, *types: Type) -> None:
    from mypy.messages import format_type

    texts = (format_type(kind, context.api.options) for kind in types)
    context.api.fail(message.format(*texts), context.context)


def plugin(version: str) -> type[Plugin]:
    """Return the plugin, as mypy asks; ``version`` is mypy's."""
    return HookimplPlugin
