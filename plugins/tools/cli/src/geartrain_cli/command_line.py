"""The command line: ``geartrain COMMAND``, and ``geartrain.cli`` for scripts.

A command is an entry point of the group ``geartrain.commands``: a function ``command(name, argv)``.
A command that trains a TARGET also takes ``target=None, defaults=None``; scripts with
``geartrain.cli`` then have it too. A command of a geartrain distribution also gets a line in
``_HELP`` and in core's ``errors/known.py``.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from geartrain import GeartrainError, UsageError, __version__
from geartrain.plugin_api import KNOWN, Registry, nearest
from geartrain_cli.panel import panel, user_lines

if TYPE_CHECKING:
    from geartrain import Trainer

#: Commands of geartrain's distributions -> description. Other commands use their package's summary.
_HELP = {
    "fit": "train a module",
    "validate": "validate a module",
    "test": "test a module",
    "predict": "predict with a module",
    "tune": "find a learning rate (tune lr TARGET) or a batch size (tune batch-size TARGET)",
    "scale": "change the number of processes of a run with --strategy elastic",
    "report": "write one HTML page about one or several runs",
    "ckpt": "list, verify, show, compare and export checkpoints",
    "explain": "show the plan and the plugins that implement each hook; start nothing",
    "plugins": "list installed plugins, and why a plugin cannot be used",
    "doctor": "examine this machine and list the fixes",
    "verify": "check for equal bits after a kill (verify resume TARGET), or on other numbers of "
    "processes (verify ranks TARGET)",
    "conformance": "test that an installed strategy fulfils the contract of strategies",
    "new": "write a project that trains, or a strategy, accelerator, plugin or command",
    "port": "rewrite a script that was written for PyTorch Lightning",
}

#: Commands of other programs -> geartrain's.
_MEANT = {
    **dict.fromkeys(["train", "run"], "fit"),
    **dict.fromkeys(["eval", "evaluate", "val"], "validate"),
    **dict.fromkeys(["infer", "inference"], "predict"),
}
_EXAMPLES = (
    "geartrain new project spirals",
    "geartrain fit spirals.py --max-epochs 20 --seed 1",
    "geartrain fit spirals.py --strategy ddp --devices 2",
    "geartrain report runs",
)
_GROUPS = {
    "train and evaluate": ("fit", "validate", "test", "predict", "tune", "scale"),
    "look": ("report", "ckpt", "explain", "plugins", "doctor"),
    "write and test code": ("verify", "new", "port", "conformance"),
    "other commands": (),
}
_USAGE = (
    "TARGET is file.py, file.py:Class or package.module:Class. Instead of a TARGET, conformance "
    "takes a strategy's name, new takes a kind and a name, port takes a file, report and scale "
    "take folders of runs, ckpt takes an action and files; plugins and doctor take nothing.",
    "geartrain COMMAND TARGET --help lists the options that people use, with those of the target "
    "and of selected plugins; --help-all lists all. With --traceback, an error shows its whole "
    "traceback.",
)

#: The option of every command that requests the whole traceback.
_WHOLE = "--traceback"
#: The environment variable that does the same.
_TRACEBACK = "GEARTRAIN_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 wrong usage; 75 if ``preemption`` ended it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_usage()
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"geartrain {__version__}")
        return 0
    others, whole = _without_flag(arguments[1:])
    return _guarded(arguments[0], lambda: _command(arguments[0])(arguments[0], others), whole)


def _print_usage() -> None:
    from geartrain_cli.tables import Group, show, show_text  # rich takes time

    show_text("usage: geartrain COMMAND TARGET [options]")
    print()
    listed = _listed(Registry())
    titles = {name: title for title, names in _GROUPS.items() for name in names}
    groups = {title: Group(title) for title in _GROUPS}
    for name, message in listed.items():
        groups[titles.get(name, "other commands")].rows.append((name, message))
    show([Group("examples", [(example,) for example in _EXAMPLES]), *groups.values()])
    for paragraph in _USAGE:
        print()
        show_text(paragraph)


def _listed(registry: Registry) -> dict[str, str]:
    """Return all commands and descriptions, from metadata alone; also those not installed."""
    installed = {candidate.name: candidate for candidate in registry.of("command")}
    listed = {name: message for name, message in _HELP.items() if name in installed}
    for name, candidate in installed.items():
        distribution = candidate.entry_point.dist
        summary = distribution.metadata.get("Summary", "") if distribution else ""
        listed.setdefault(name, str(summary))
    for name in _HELP:
        listed.setdefault(
            name, f"{_HELP[name]} (not installed: pip install {KNOWN['command', name]})"
        )
    return listed


def _command(name: str) -> Callable[..., Any]:
    """Import the function of one command; `geartrain plugins` must not import torch.

    Raises:
        UsageError: the command is unknown, not installed, or cannot be imported.
    """
    registry = Registry()
    names = [candidate.name for candidate in registry.of("command")]
    if name not in names:
        if ("command", name) in KNOWN:
            raise UsageError(
                f"geartrain {name} is not installed. Fix: pip install {KNOWN['command', name]}"
            )
        known = [*names, *(n for kind, n in KNOWN if kind == "command")]
        answer = f"Did you mean {_MEANT[name]!r}?" if name in _MEANT else nearest(name, known)
        if name.partition(":")[0].endswith(".py"):
            answer = f"Fix: geartrain fit {name}"
        raise UsageError(f"there is no command {name!r}. {answer}")
    command: Callable[..., Any] = registry.load(registry.find("command", name))
    return command


def _without_flag(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Remove ``--traceback``; also return True if it or the environment requests a traceback."""
    others = [argument for argument in arguments if argument != _WHOLE]
    return others, len(others) < len(arguments) or bool(os.environ.get(_TRACEBACK))


def _guarded(name: str, action: Callable[[], Any], whole: bool) -> int:
    """Run an action. Print an error as one message and return an exit code.

    An error that no line of the user raised propagates.

    Args:
        whole: also show the traceback. Of an error of user code Python does it, or a debugger.
    """
    try:
        action()
    except GeartrainError as error:
        if whole:
            traceback.print_exception(error)
        print(panel(error, f"geartrain {name}", _WHOLE), file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt as error:
        print(f"geartrain {name}: interrupted", file=sys.stderr)
        return getattr(error, "code", 1)  # geartrain-resilience's Preempted has its own
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            remedy = "pip install torch (a build for your hardware)"
            print(f"geartrain {name}: torch is not installed. Fix: {remedy}", file=sys.stderr)
            return 2
        if whole or not user_lines(error):
            raise
        print(panel(error, f"geartrain {name}", _WHOLE), file=sys.stderr)
        return 1
    return 0


def cli(
    model: type,
    data: type | None = None,
    argv: Sequence[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Trainer:
    """Give a script the options of ``geartrain fit``.

    Call it as ``python train.py --strategy ddp --devices 2 --model.hidden 128``.

    Args:
        model: the ``Module`` subclass to run.
        data: the ``DataModule`` subclass, unless the module brings its data.
        argv: arguments, default ``sys.argv[1:]``; the first may be a command
            (``python train.py test --checkpoint ...``).
        defaults: options in the form of a config file, such as ``{"max_epochs": 10, "seed": 42}``;
            the command line overrides them.

    Returns:
        The trainer, after the run.

    Raises:
        SystemExit: exit code 1 if the run failed, 2 for wrong usage.
    """
    from geartrain import Trainer  # commands without a target do not need torch

    if Trainer.refusal:
        raise UsageError(Trainer.refusal)
    arguments, whole = _without_flag(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "fit"
    done: list[Any] = []
    code = _guarded(
        name,
        lambda: done.append(
            _of_target(name)(name, arguments, target=(model, data), defaults=defaults)
        ),
        whole,
    )
    if code:
        raise SystemExit(code)
    trainer: Trainer = done[0]
    return trainer


def _of_target(name: str) -> Callable[..., Any]:
    """Return the function of a command that takes a target.

    Raises:
        UsageError: the command takes no target.
    """
    command = _command(name)
    if "target" not in inspect.signature(command).parameters:
        raise UsageError(
            f"{name!r} takes no target, so a script has no such command. Fix: geartrain {name}"
        )
    return command
