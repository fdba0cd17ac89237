"""``geartrain ckpt list|verify|show|diff|export``: look at checkpoints, and convert them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from geartrain import GeartrainError, UsageError
from geartrain.plugin_api import nearest, user_path
from geartrain_cli.help import CommandParser
from geartrain_cli.tables import Group, show, show_text
from geartrain_tools.checkpoints.compare import compared, diff_tables, verdict
from geartrain_tools.checkpoints.contents import find_file, find_files, label_of, read
from geartrain_tools.checkpoints.damage import Verdict, verify
from geartrain_tools.checkpoints.export import (
    FORMATS,
    WEIGHTS,
    check_target,
    chosen_weights,
    config_of,
    format_of,
    part_of,
    write,
)
from geartrain_tools.checkpoints.facts import described, list_table, listed, show_tables
from geartrain_tools.checkpoints.text import print_json, print_tables, printable, size, table

_EXAMPLES = (
    "geartrain ckpt list runs/1",
    "geartrain ckpt verify runs/1",
    "geartrain ckpt show runs/1/last.ckpt",
    "geartrain ckpt diff runs/1/last.ckpt runs/2/last.ckpt",
    "geartrain ckpt export runs/1/last.ckpt model.safetensors",
)
_ACTIONS = (
    ("list DIR", "the checkpoints of a run: step, epoch, score, size, date"),
    ("verify PATH", "reads a file, or all of a folder, and names damaged parts"),
    ("show PATH", "what a file has: versions, plan, position, sizes, what cannot be restored"),
    ("diff A B", "the tensors and settings in which two files differ"),
    ("export PATH OUT", "writes the weights for other programs"),
)


def command(name: str, argv: list[str]) -> None:
    """Look at checkpoints, or export one.

    Raises:
        UsageError: an argument is wrong.
        GeartrainError: ``verify`` found a damaged file.
    """
    if argv[:1] in (["-h"], ["--help"], ["--help-all"]):
        show_text("usage: geartrain ckpt list|verify|show|diff|export PATH [options]")
        print()
        show([Group("examples", [(each,) for each in _EXAMPLES]), Group("actions", _ACTIONS)])
        print()
        show_text("No code from a file runs. geartrain ckpt export --help lists its options.")
        raise SystemExit(0)
    if not argv or argv[0] not in _RUN:
        known = "|".join(_RUN)
        given = f"there is no action {argv[0]!r}. {nearest(argv[0], _RUN)}" if argv else ""
        raise UsageError(f"{given or 'no action is given.'} Fix: geartrain {name} {known} PATH")
    _RUN[argv[0]](f"{name} {argv[0]}", argv[1:])


def _read(
    name: str, argv: list[str], summary: str, example: str, arguments: Mapping[str, str]
) -> argparse.Namespace:
    """Return the arguments of an action without options of its own."""
    parser = CommandParser(name, summary, (example,))
    for argument, meaning in arguments.items():
        parser.add_argument(argument, metavar=argument.upper(), nargs="?", help=meaning)
    return _parsed(parser, argv)


def _parsed(parser: CommandParser, argv: list[str]) -> argparse.Namespace:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        options, unknown = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}. Fix: {parser.prog} --help lists them") from error
    if unknown:
        known = [string for action in parser._actions for string in action.option_strings]
        hint = f" {nearest(unknown[0], known)}" if unknown[0].startswith("-") else ""
        kind = "option" if unknown[0].startswith("-") else "argument"
        raise UsageError(
            f"there is no {kind} {unknown[0]}.{hint} Fix: {parser.prog} --help lists them"
        )
    for action in parser._actions:
        if not action.option_strings and getattr(options, action.dest) is None:
            raise UsageError(f"{action.metavar} is missing. Fix: {parser.prog} --help")
    return options


# --- the actions ----------------------------------------------------------------------------------


def _list(name: str, argv: list[str]) -> None:
    example = "geartrain ckpt list runs/1"
    meaning = {"path": "the folder of a run (--output of fit), or one of its files"}
    given = _read(name, argv, "list the checkpoints of a run", example, meaning)
    folder, files = user_path(given.path, "PATH"), find_files(given.path)
    folder = folder if folder.is_dir() else folder.parent
    rows = listed(folder, files)
    if given.json:
        print_json({"folder": str(folder), "checkpoints": rows})
        return
    show([list_table(f"checkpoints of {folder}", rows)])


def _verify(name: str, argv: list[str]) -> None:
    meaning = {"path": "a checkpoint, or a folder with checkpoints"}
    example = "geartrain ckpt verify runs/1"
    given = _read(name, argv, "read checkpoints and name damaged parts", example, meaning)
    files = find_files(given.path)
    found = {path: verify(path) for path in files}
    damaged = [path for path, result in found.items() if result.damages]
    count = "1 checkpoint" if len(files) == 1 else f"{len(files)} checkpoints"
    if given.json:
        facts = [{"file": str(path), **result.as_dict()} for path, result in found.items()]
        print_json({"damaged": len(damaged), "checkpoints": facts})
    else:
        folder = user_path(given.path, "PATH", reads=True)
        folder = folder if folder.is_dir() else folder.parent
        rows = [row for path, result in found.items() for row in _verdict(path, folder, result)]
        print_tables(f"{count} read, {len(damaged) or 'none'} damaged", [table("files", rows)])
    if damaged:
        names = ", ".join(map(str, damaged[:3])) + (" and others" if len(damaged) > 3 else "")
        verb = "is" if len(damaged) == 1 else "are"
        raise GeartrainError(f"{len(damaged)} of {count} {verb} damaged: {names}")


def _verdict(path: Path, folder: Path, result: Verdict) -> list[tuple[str, str, str]]:
    rows = [("damaged", f"{each.part}: {each.problem}") for each in result.damages]
    rows += [("complete", note) for note in result.notes]
    names = [label_of(path, folder), *[""] * len(rows)]
    return [(n, *row) for n, row in zip(names, rows or [("complete", "")], strict=False)]


def _show(name: str, argv: list[str]) -> None:
    meaning = {"path": "a checkpoint"}
    example = "geartrain ckpt show runs/1/last.ckpt"
    given = _read(name, argv, "show what a checkpoint contains", example, meaning)
    facts = described(find_file(given.path))
    if given.json:
        print_json(facts)
    else:
        show(show_tables(facts))


def _diff(name: str, argv: list[str]) -> None:
    meaning = {"a": "a checkpoint", "b": "another checkpoint"}
    example = "geartrain ckpt diff runs/1/last.ckpt runs/2/last.ckpt"
    given = _read(name, argv, "compare two checkpoints", example, meaning)
    paths = find_file(given.a), find_file(given.b)
    for path in paths:
        _refuse_damaged(path)
    facts = compared(*map(read, paths))
    if given.json:
        print_json({"a": str(paths[0]), "b": str(paths[1]), **facts})
    else:
        print_tables(verdict(facts), diff_tables(facts))


def _export(name: str, argv: list[str]) -> None:
    parser = CommandParser(
        name,
        "write the weights of a checkpoint for other programs",
        (
            "geartrain ckpt export runs/1/last.ckpt model.safetensors",
            "geartrain ckpt export runs/1/last.ckpt model --format hf",
            "geartrain ckpt export runs/1/last.ckpt gpt2 --format hf --submodule model "
            "--config gpt2.json",
        ),
    )
    parser.add_argument("path", metavar="PATH", nargs="?", help="a checkpoint")
    parser.add_argument(
        "out", metavar="OUT", nargs="?", help="the new file; with --format hf a folder"
    )
    parser.add_argument(
        "--format",
        metavar="|".join(FORMATS),
        help="state_dict: for torch.load; safetensors; hf: a folder for from_pretrained. "
        "Default: by OUT's ending, .pt, .pth or .safetensors",
    )
    parser.add_argument(
        "--weights",
        metavar="|".join(WEIGHTS),
        help="the averaged or the trained ones, if a plugin such as ema saved both; default: those "
        "that geartrain test loads",
    )
    parser.add_argument(
        "--submodule", metavar="NAME", help="only the weights of this attribute of the module"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the config.json of a model of transformers, for --format hf; default: the module's "
        "hyperparameters",
    )
    given = _parsed(parser, argv)
    path, out = find_file(given.path), user_path(given.out, "OUT")
    kind = format_of(given.format, out)
    if given.config is not None and kind != "hf":
        raise UsageError(f"--config is for --format hf, not {kind}. Fix: leave it out")
    check_target(out, kind)
    _refuse_damaged(path)
    state = read(path)
    weights = part_of(chosen_weights(state, given.weights), given.submodule)
    config = config_of(state, given.config) if kind == "hf" else {}
    write(weights, config, out, kind)
    written = sum(file.stat().st_size for file in ([out] if out.is_file() else out.iterdir()))
    if given.json:
        print_json({"file": str(out), "format": kind, "entries": len(weights), "bytes": written})
    else:
        show_text(printable(f"export: {out} ({kind}, {len(weights)} entries, {size(written)})"))


def _refuse_damaged(path: Path) -> None:
    damages = verify(path).damages
    if damages:
        raise GeartrainError(
            f"{path} is damaged: {damages[0].part}: {damages[0].problem}. Fix: use another file"
        )


_RUN: Mapping[str, Callable[[str, list[str]], None]] = {
    "list": _list,
    "verify": _verify,
    "show": _show,
    "diff": _diff,
    "export": _export,
}
