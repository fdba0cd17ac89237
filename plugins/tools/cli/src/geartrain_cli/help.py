"""The text of ``--help``: examples first, then the options that people use, in groups.

``--help-all`` shows every option.
"""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from geartrain_cli.tables import Group, table, wrapped

#: A longer option has a line of its own.
_FIRST = 28
#: Title -> options that people use, and the others; the latter need ``--help-all``.
_GROUPS: Mapping[str, tuple[str, str]] = {
    "training": (
        "max_epochs max_steps max_time max_restarts seed precision accumulate_grad_batches "
        "gradient_clip_val",
        "min_epochs min_steps gradient_clip_algorithm deterministic detect_anomaly "
        "reload_dataloaders_every_n_epochs use_distributed_sampler sync_batchnorm "
        "optimizer lr_scheduler",
    ),
    "devices": ("accelerator devices num_nodes strategy", ""),
    "folder and checkpoints": ("output no_output resume checkpoint", ""),
    "validation and logged metrics": (
        "check_val_every_n_epoch val_check_interval log_every_n_steps",
        "num_sanity_val_steps inference_mode",
    ),
    "fewer batches": (
        "fast_dev_run limit_train_batches limit_val_batches overfit_batches",
        "limit_test_batches limit_predict_batches",
    ),
    "plan": ("hooks assume", ""),
    "plugins and files of options": ("plugins config print_config", "block"),
}
#: Groups of options that only a fit has.
_OF_FIT = ("validation and logged metrics",)
#: Options of the training loop that an evaluation needs too.
_OF_EVALUATION = ("seed", "precision")
#: Option -> the form of its value.
_VALUES = {
    **dict.fromkeys(("accelerator", "strategy", "precision"), "NAME"),
    **dict.fromkeys(("config", "checkpoint"), "FILE"),
    **dict.fromkeys(("optimizer", "lr_scheduler"), "CLASS"),
    **dict.fromkeys(
        (
            *("limit_train_batches", "limit_val_batches", "limit_test_batches"),
            *("limit_predict_batches", "overfit_batches"),
        ),
        "N|X",
    ),
    "plugins": "NAME_OR_FILE",
    "block": "NAME",
    "assume": "NAME=COUNT",
    "output": "DIR",
    "resume": "[FILE]",
    "devices": "N|LIST",
    "max_time": "TIME",
    "fast_dev_run": "[N]",
    "val_check_interval": "N|X|TIME",
    "deterministic": "[warn]",
    "gradient_clip_algorithm": "NAME",
    "print_config": "",
}
#: Type -> the form of its value.
_TYPES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_LAST = (
    ("-q, --quiet", "no progress bar and no closing table"),
    ("--traceback", "show an error's whole traceback"),
    ("-h, --help", "show the options that people use"),
    ("--help-all", "show every option"),
)
#: Command -> examples: options after the command and its target.
_EXAMPLES: Mapping[str, Sequence[str]] = {
    "fit": (
        "--max-epochs 20 --seed 1",
        "--strategy ddp --devices 2",
        "--config options.yaml",
        "--output runs/1 --resume",
    ),
    **dict.fromkeys(("validate", "test"), ("--checkpoint runs/1/last.ckpt",)),
    "predict": ("--checkpoint runs/1/last.ckpt --output predictions",),
    "explain": ("", "--hooks", "--assume cuda=8 --devices 8 --strategy ddp"),
    "tune lr": ("", "--max-lr 0.1 --output tuned"),
    "tune batch-size": ("", "--mode binsearch"),
}


def options_help(
    parser: Any,
    command: str,
    program: str,
    own: Iterable[str],
    required: Iterable[str],
    shows_all: bool,
) -> str:
    """Return the help of a command with a target.

    Args:
        parser: jsonargparse's, with all options.
        program: the beginning of a command line: the command and its target.
        own: names of options that only this command has.
        required: names of options without a default; jsonargparse hides them while it parses.
        shows_all: show every option.
    """
    width = Console().width
    lines = [*wrapped(f"usage: {program} [options]", width), ""]
    examples = [(f"{program} {options}".rstrip(),) for options in _EXAMPLES.get(command, ())]
    if examples:
        lines += [*_lines("examples", examples, width), ""]
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    shown = {"help", "json"}  # the last group has them

    def add(title: str, names: Iterable[str]) -> None:
        found = [name for name in names if name in actions and name not in shown]
        shown.update(found)
        if found:
            rows = [_row(actions[name], actions, required) for name in found]
            lines.extend([*_lines(title, rows, width), ""])

    titles = {
        action.dest: group.title or ""
        for group in parser._action_groups
        for action in group._group_actions
    }
    of_objects = {name.partition(".")[0]: None for name in actions if "." in name}
    for key in of_objects:
        names = [name for name in actions if name.startswith(f"{key}.")]
        is_file = shows_all and not key.endswith("_options")
        add(_title(key, titles[names[0]]), [*names, *([key] if is_file else [])])
    add(command, own)
    for title, (used, others) in _GROUPS.items():
        names = [*used.split(), *(others.split() if shows_all else ())]
        if command in ("validate", "test", "predict") and not shows_all:
            limit = {"validate": "val"}.get(command, command)
            names = [*names, f"limit_{limit}_batches"] if title == "fewer batches" else names
            if title in _OF_FIT:
                continue
            if title in ("training", "fewer batches"):
                allowed = {*_OF_EVALUATION, "fast_dev_run", f"limit_{limit}_batches"}
                names = [name for name in names if name in allowed]
        add(title, names)
    if shows_all:
        add("other options", [name for name in actions if name not in of_objects])
    rows = [_row(actions[name], actions, required) for name in ("json",) if name in actions]
    lines += _lines("messages and help", [*rows, *_LAST], width)
    return "\n".join(lines) + "\n"


def _title(key: str, title: str) -> str:
    """Return the title of the options of an object: what it is, and the summary of its class."""
    kind = re.sub(r"^(strategy|accelerator)_options$", r"\1", key)
    kind = {"model": "module", "data": "data module"}.get(kind, kind)
    summary = _plain(title)
    summary = f"{summary[:1].lower()}{summary[1:]}"
    return kind if not summary else summary if summary.startswith(kind) else f"{kind}: {summary}"


def _lines(title: str, rows: Sequence[Sequence[str]], width: int) -> list[str]:
    return [*wrapped(title, width), *table(Group("", rows), width, _FIRST)[1:]]


def _row(action: argparse.Action, known: Iterable[str], required: Iterable[str]) -> tuple[str, str]:
    """Return an option as it is typed, and its meaning with its default."""
    name = {"plugins": "plugin"}.get(action.dest, action.dest)
    for given in action.option_strings:
        if given.endswith(".help"):
            name = given.removeprefix("--")
    value = _value(action)
    option = f"{dashed(name)} {value}".rstrip()
    text = _plain(action.help or "", known).rstrip(".")
    if "." not in action.dest and action.metavar == "CONFIG":
        option, text = f"{dashed(name)} FILE", "these options from a YAML file"
    if action.dest.startswith("print_config"):
        text = "print all options as a YAML file for --config, and exit"
    if action.dest in required:
        text = f"{text} (required)"
    elif _is_worth_telling(action.default):
        text = f"{text} (default: {action.default})"
    return option, text.strip()


def _is_worth_telling(default: Any) -> bool:
    return default not in (None, False, "", argparse.SUPPRESS) and default != []


def dashed(name: str) -> str:
    """Return an option as people type it: ``--max-epochs``, ``--strategy.find-unused``."""
    name = re.sub(r"^(strategy|accelerator)_options", r"\1", name)
    return f"--{name.replace('_', '-')}"


def _plain(text: str, options: Iterable[str] = ()) -> str:
    """Return a docstring's text without its marks, with options as they are typed."""
    known = set(options)
    text = " ".join(text.split())
    return re.sub(
        r"``(.+?)``", lambda found: dashed(found[1]) if found[1] in known else found[1], text
    )


def _value(action: argparse.Action) -> str:
    """Return the form of an option's value; nothing for a flag."""
    if action.dest in _VALUES:
        return _VALUES[action.dest]
    kind = getattr(action, "_typehint", None)
    if kind is bool:
        # Flags without a value are the trainer's.
        return "false" if action.default is True else "true" if "." in action.dest else ""
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar.startswith("{") and len(metavar) < _FIRST:
        return metavar
    if kind is None:
        return metavar or "VALUE"
    forms = dict.fromkeys(_form(member) for member in _members(kind) if member is not type(None))
    return "|".join(forms) if len(forms) < 4 else "VALUE"


def _members(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _form(kind: Any) -> str:
    if kind in _TYPES:
        return _TYPES[kind]
    origin = typing.get_origin(kind) or kind
    if origin is bool:
        return "true"
    if isinstance(origin, type) and issubclass(origin, list | tuple | set | Sequence):
        return "LIST"
    return "MAPPING" if isinstance(origin, type) and issubclass(origin, Mapping) else "VALUE"


def print_titled(text: str) -> None:
    """Print help. Lines that are not indented are titles."""
    console = Console(markup=False, highlight=False, emoji=False)
    for line in text.splitlines():
        console.print(Text(line, "" if line.startswith(" ") else "bold"), soft_wrap=True)


class CommandParser(argparse.ArgumentParser):
    """The parser of a command without a target; its help has the style of the others.

    Args:
        name: the command.
        summary: one sentence about it.
        examples: command lines.
    """

    def __init__(self, name: str, summary: str, examples: Sequence[str]) -> None:
        super().__init__(
            prog=f"geartrain {name}",
            description=summary,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.examples = examples

    def format_help(self) -> str:
        """Return the usage, the examples, then arguments and options."""
        width = Console().width
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, str]] = []
        for action in self._actions:
            names = ", ".join(action.option_strings)
            value = "" if action.nargs == 0 else str(action.metavar or action.dest)
            row = (f"{names} {value}".strip(), action.help or "")
            (options if names else arguments).append(row)
        usage = " ".join([f"usage: {self.prog}", *(name for name, _ in arguments), "[options]"])
        lines = [*wrapped(usage, width), "", *wrapped(self.description or "", width), ""]
        lines += _lines("examples", [(example,) for example in self.examples], width)
        for title, rows in (("arguments", arguments), ("options", options)):
            if rows:
                lines += ["", *_lines(title, rows, width)]
        return "\n".join(lines) + "\n"

    def print_help(self, file: Any = None) -> None:
        """Print the help, its titles bold on a terminal."""
        print_titled(self.format_help())
