"""``geartrain explain TARGET``: print the plan and the implementations of each hook."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from geartrain import Plan, Trainer
from geartrain.plugin_api import Hooks, PluginInfo
from geartrain_cli.arguments import Request, read_arguments
from geartrain_cli.json_output import printed_on_stderr
from geartrain_cli.tables import Group, show, show_text
from geartrain_cli.target import Target


def command(
    name: str,
    argv: list[str],
    target: Target | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Trainer:
    """Print the plan; with ``--hooks`` the table of hooks, with ``--memory`` a rank's memory.

    Without ``--memory`` neither module nor data is made: the batch size is the data's
    ``batch_size`` option.
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
    memory = _predicted(request) if values.memory else None
    if values.json:
        hooks = {
            hook: [choice.name for choice in trainer.hooks.implementers(hook)]
            for hook in trainer.hooks.names
        }
        facts = {**plan.as_dict(), "hooks": hooks}
        print(json.dumps(facts if memory is None else {**facts, "memory": memory}, indent=2))
    else:
        groups = [*_plan(plan), *([] if memory is None else [_memory(plan, memory)])]
        show([*groups, *([_hooks(trainer.hooks)] if values.hooks else [])])
        if not values.hooks:
            print()
            show_text("--hooks lists the plugins that answer each hook, --json all of it.")
    return trainer


def _predicted(request: Request) -> dict[str, Any]:
    """Return the prediction of ``--memory``; the target's output goes to standard error."""
    from geartrain_cli.memory import predict  # imports torch.distributed

    with printed_on_stderr():
        return predict(request).as_dict()


def _memory(plan: Plan, memory: Mapping[str, Any]) -> Group:
    rows = [
        ("parameters", _bytes(memory["parameters"]), "and buffers"),
        ("gradients", _bytes(memory["gradients"]), "and the buckets of ddp"),
        ("optimizer states", _bytes(memory["optimizer_states"]), ""),
        ("activations", _bytes(memory["activations"]), "batches, temporary and gathered tensors"),
        ("peak", _bytes(memory["peak"]), "the most in a training step"),
        ("sent", _bytes(memory["sent_per_step"]), "in each optimizer step; the mean of all ranks"),
    ]
    if memory["peak"] == memory["set_up"]:
        rows[4] = ("peak", _bytes(memory["peak"]), "while the model is made and wrapped")
    if plan.accelerator.name != "cpu":
        name = plan.accelerator.name
        text = f"what {name} needs beside tensors; its kernels may use more temporary ones"
        rows.append(("not counted", name, text))
    rows += [("not counted", label, "it only watches the run") for label in memory["left_out"]]
    text = "predicted: counted from fake tensors, not measured"
    return Group("memory of a rank", rows, columns=("size", text))


def _bytes(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"


def _plan(plan: Plan) -> Iterator[Group]:
    processes = "as the launcher decides" if plan.processes is None else str(plan.processes)
    choices = ("accelerator", plan.accelerator), ("strategy", plan.strategy)
    parts = [
        *((kind, _label(choice), choice.reason) for kind, choice in choices),
        ("precision", _label(plan.precision), plan.precision.reason),
        ("devices", str(list(plan.devices)), f"on each of {plan.num_nodes} node(s)"),
        ("processes", processes, f"{plan.layout.devices_per_process} device(s) each"),
        ("batch size", *_batch_size(plan)),
        *((name, change, f"set by {plan.strategy.name}") for name, change in plan.notes.items()),
    ]
    yield Group("plan", parts, columns=("choice", "reason"))
    yield Group("options", [(changed,)] if (changed := _changed(plan)) else [])
    yield Group(
        "plugins", [(choice.name, _package(choice), choice.reason) for choice in plan.plugins]
    )
    over: dict[str, list[str]] = {}
    for label, reason in plan.passed_over.items():
        over.setdefault(reason, []).append(label.partition("[")[2].rstrip("]") or label)
    yield Group("passed over", [(", ".join(names), reason) for reason, names in over.items()])


def _changed(plan: Plan) -> str:
    """Return the options of the loop that are not the defaults."""
    pairs = ((f, getattr(plan.options, f.name)) for f in fields(plan.options))
    return ", ".join(
        f"{field.name}={current!r}" for field, current in pairs if current != field.default
    )


def _batch_size(plan: Plan) -> tuple[str, str]:
    if plan.per_device_batch is None:
        return "known when the loaders are made", "the data has no batch_size option"
    factors = [(len(plan.devices), "devices"), (plan.num_nodes, "nodes")]
    size = plan.layout.model_parallel_size
    if size > 1 and plan.processes is not None:
        factors = [(plan.processes // size, "models")]
    factors.append((plan.options.accumulate_grad_batches, "accumulated"))
    more = "".join(f" × {number} {message}" for number, message in factors if number > 1)
    return f"global {plan.global_batch}", f"{plan.per_device_batch} per device{more}"


def _label(choice: PluginInfo) -> str:
    package = _package(choice)
    return f"{choice.name} ({package})" if package else choice.name


def _package(choice: PluginInfo) -> str:
    return f"{choice.distribution} {choice.version}" if choice.distribution else ""


def _hooks(hooks: Hooks) -> Group:
    """Return each hook with its plugins in call order and its wrappers, the outermost first."""
    group = Group("hooks", columns=("plugins",))
    for hook in hooks.names:
        owner, wrappers = hooks.owner(hook), hooks.wrappers(hook)
        plain = hooks.implementers(hook)[len(wrappers) :]
        facts = [", ".join(choice.name for choice in plain) or "-"]
        if wrappers:
            facts.append(f"wrapped by {', '.join(choice.name for choice in wrappers)}")
        if owner and (over := [choice.name for choice in hooks.passed_over(hook)]):
            facts.append(f"passed over: {', '.join(over)} ({owner.name} owns it)")
        group.rows.append((hook, "; ".join(facts)))
    return group
