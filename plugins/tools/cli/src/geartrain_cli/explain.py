"""``geartrain explain TARGET``: print the plan and the implementations of each hook."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from geartrain import Plan, Trainer
from geartrain.plugin_api import Hooks, PluginInfo
from geartrain_cli.arguments import read_arguments
from geartrain_cli.target import Target


def command(
    name: str,
    argv: list[str],
    target: Target | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Trainer:
    """Print the plan and, with ``--hooks``, the table of hooks.

    Neither module nor data is made: the batch size is the data's ``batch_size`` option.
    """
    request = read_arguments(name, argv, target, defaults)
    trainer, values = request.trainer, request.values
    sizes = [
        group.get("batch_size")
        for group in (values.get("data"), values.get("model"))
        if group is not None
    ]
    plan = trainer.check(
        request.target[0], batch_size=next((size for size in sizes if isinstance(size, int)), None)
    )
    if values.json:
        hooks = {
            hook: [choice.name for choice in trainer.hooks.implementers(hook)]
            for hook in trainer.hooks.names
        }
        print(json.dumps({**plan.as_dict(), "hooks": hooks}, indent=2))
    else:
        console = Console(markup=False)  # labels have brackets: geartrain-mps[mps]
        _print_plan(console, plan)
        if values.hooks:
            _print_hooks(console, trainer.hooks)
        else:
            console.print("\n--hooks lists the plugins that answer each hook, --json all of it.")
    return trainer


def _print_plan(console: Console, plan: Plan) -> None:
    table = Table("what", "chosen", Column("why", overflow="fold"), show_edge=False)
    for kind, choice in (
        ("accelerator", plan.accelerator),
        ("strategy", plan.strategy),
        ("precision", plan.precision),
    ):
        table.add_row(kind, _label(choice), choice.reason)
    table.add_row("devices", str(list(plan.devices)), f"on each of {plan.num_nodes} node(s)")
    processes = "as the launcher decides" if plan.processes is None else str(plan.processes)
    table.add_row("processes", processes, f"{plan.layout.devices_per_process} device(s) each")
    table.add_row("batch size", *_batch_size(plan))
    if changed := _changed(plan):
        table.add_row("options", changed, "not the defaults")
    for message, how in plan.notes.items():
        table.add_row(message, how, f"set by {plan.strategy.name}")
    for choice in plan.plugins:
        table.add_row("plugin", _label(choice), choice.reason)
    cause: dict[str, list[str]] = {}
    for label, reason in plan.passed_over.items():
        cause.setdefault(reason, []).append(label.partition("[")[2].rstrip("]") or label)
    for reason, names in cause.items():
        table.add_row("passed over", ", ".join(names), reason)
    console.print(table)


def _changed(plan: Plan) -> str:
    """Return the options of the loop that are not the defaults."""
    pairs = ((f, getattr(plan.options, f.name)) for f in fields(plan.options))
    return ", ".join(
        f"{field.name}={current!r}" for field, current in pairs if current != field.default
    )


def _batch_size(plan: Plan) -> tuple[str, str]:
    if plan.per_device_batch is None:
        return "known when the loaders are made", "the data has no batch_size option"
    factors = (
        (len(plan.devices), "devices"),
        (plan.num_nodes, "nodes"),
        (plan.options.accumulate_grad_batches, "accumulated"),
    )
    more = "".join(f" × {number} {message}" for number, message in factors if number > 1)
    return f"global {plan.global_batch}", f"{plan.per_device_batch} per device{more}"


def _label(choice: PluginInfo) -> str:
    if not choice.distribution:
        return choice.name
    return f"{choice.name} ({choice.distribution} {choice.version})"


def _print_hooks(console: Console, hooks: Hooks) -> None:
    console.print()
    table = Table(show_edge=False)
    table.add_column("hook", no_wrap=True)
    for column in ("answered by, in call order", "wrapped by, outermost first", "passed over"):
        table.add_column(column)
    for hook in hooks.names:
        owner, wrappers = hooks.owner(hook), hooks.wrappers(hook)
        plain = hooks.implementers(hook)[len(wrappers) :]
        over = (
            [f"{choice.name}: {owner.name} owns it" for choice in hooks.passed_over(hook)]
            if owner
            else []
        )
        table.add_row(hook, _names(plain), _names(wrappers), ", ".join(over))
    console.print(table)


def _names(choices: list[PluginInfo]) -> str:
    return ", ".join(choice.name for choice in choices)
