"""``geartrain new KIND NAME``: write a project that trains, or a package with a plugin."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shlex
from pathlib import Path

from geartrain import UsageError
from geartrain.plugin_api import KNOWN, Registry, nearest, user_path
from geartrain_cli.help import CommandParser

#: One folder per kind, with the name ``mine``. The written files have their own name instead.
_TEMPLATES = Path(__file__).with_name("templates")

#: Names with another meaning on the command line: ``--accelerator auto``, ``--model.lr``.
_RESERVED = (
    "accelerator",
    "auto",
    "config",
    "data",
    "gpu",
    "model",
    "plugin",
    "strategy",
    "trainer",
)
#: With a longer name, ruff would format some lines of the templates differently.
_LONGEST = 24

_PROJECT = "project"
#: Kind -> the command to try what was written.
_TRY = {
    _PROJECT: "geartrain fit {name}.py --config config.yaml",
    "strategy": "geartrain fit train.py --strategy {name} --devices 2",
    "accelerator": "{variable}_DEVICES=1 geartrain fit train.py --accelerator {name}",
    "plugin": "geartrain fit train.py --plugin {name}",
    "logger": "geartrain fit train.py --plugin {name}",
    "precision": "geartrain fit train.py --precision {name}",
    "command": "geartrain {name} RUN",
}


def command(name: str, argv: list[str]) -> None:
    """Write a project or a package, and print its files and the next commands.

    Raises:
        UsageError: the kind is unknown, the name cannot be used, or the folder is not empty.
    """
    parser = CommandParser(
        name,
        "write a project that trains, or a package with a plugin",
        (
            "geartrain new project spirals",
            "geartrain new strategy mine",
        ),
    )
    parser.add_argument("kind", metavar="KIND", nargs="?", help=", ".join(_TRY))
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="what people will type: lower-case letters and digits, - or _ between them "
        "(_ for a project, which Python imports)",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="the folder to write; default NAME for a project, otherwise geartrain-NAME",
    )
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"there is no option {unknown[0]}. Known: --output DIR")
    if given.kind is None:
        raise UsageError(f"the kind is missing. Fix: geartrain {name} {'|'.join(_TRY)} NAME")
    if given.kind not in _TRY:
        raise UsageError(f"there is no kind {given.kind!r}. {nearest(given.kind, _TRY)}")
    if given.name is None:
        raise UsageError(
            f"the {given.kind}'s name is missing. Fix: geartrain {name} {given.kind} NAME"
        )
    if given.kind == _PROJECT:
        _check_project(given.name)
        default = given.name
    else:
        _check_name(given.kind, given.name)
        default = f"geartrain-{given.name.replace('_', '-')}"
    folder = user_path(given.output or default, "--output")
    written = _write(given.kind, given.name, folder)
    _say(given.kind, given.name, folder, written)


def _check_project(name: str) -> None:
    """Refuse a name that Python cannot import, or that imports something else."""
    _check_form(_PROJECT, name, "_")
    hint = f"Fix: use another name, for example my_{name}"
    if keyword.iskeyword(name):
        raise UsageError(f"{name!r} is a keyword of Python, which cannot be imported. {hint}")
    spec = importlib.util.find_spec(name)
    # A folder without __init__.py has no origin, and a project's module wins over it.
    if spec is not None and spec.origin is not None:
        raise UsageError(
            f"{name!r} is the name of an installed Python module, which {name}.py would "
            f"hide. {hint}"
        )


def _check_form(kind: str, name: str, separators: str) -> None:
    """Refuse a name that cannot be typed."""
    if not re.fullmatch(rf"[a-z][a-z0-9]*([{separators}][a-z0-9]+)*", name):
        better = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789") or "mine"
        raise UsageError(
            f"{name!r} cannot be a {kind}'s name: use lower-case letters and digits, a letter "
            f"first, and one {' or '.join(separators)} between words. "
            f"Fix: geartrain new {kind} {better}"
        )
    if len(name) > _LONGEST:
        raise UsageError(
            f"{name!r} has {len(name)} characters. "
            f"Fix: use a name of at most {_LONGEST}, because people will type it"
        )


def _check_name(kind: str, name: str) -> None:
    """Refuse a plugin's name that cannot be typed, or that is already used."""
    _check_form(kind, name, "-_")
    hint = "Fix: use another name"
    if name in _RESERVED:
        raise UsageError(
            f"{name!r} already has a meaning on geartrain's command line. "
            f"{hint}, for example {name}_2 or my_{name}"
        )
    same = _same(name)
    if kind in ("plugin", "logger"):
        try:
            # Here, because strategies and accelerators do not need the parser.
            from geartrain_cli.arguments import option_names
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            # The options include the Trainer's, which needs torch. Without torch, a name in use is
            # refused later: when a user chooses the plugin.
            taken: frozenset[str] = frozenset()
        else:
            taken = option_names()
        if same in taken:
            raise UsageError(
                f"{name!r} is an option of geartrain's command line (--{name}), and the plugin's "
                f"options would start with it. {hint}, for example {name}_2 or my_{name}"
            )
    for candidate in Registry().candidates:
        if _same(candidate.name) == same:
            raise UsageError(
                f"{name!r} is the name of the installed {candidate.kind} {candidate.label}. "
                f"{hint}, or uninstall that one"
            )
    for (other, known), distribution in KNOWN.items():
        if _same(known) == same:
            raise UsageError(
                f"{name!r} is the {other} of {distribution}, a plugin that geartrain knows. "
                f"{hint}, or pip install {distribution}"
            )
    if importlib.util.find_spec(f"geartrain_{same}") is not None:
        raise UsageError(
            f"{name!r}: a package geartrain_{same}, as the {kind}'s would be called, is already "
            f"installed. {hint}"
        )


def _same(name: str) -> str:
    """Return a name's normal form: names with the same form make packages with the same name."""
    return name.lower().replace("-", "_")


# --- writing --------------------------------------------------------------------------------------


def _write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write the kind's files into ``folder``.

    Returns:
        The files, relative to ``folder``.

    Raises:
        UsageError: the folder is not empty, or cannot be written. Nothing is overwritten.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"{folder} exists and is not empty; nothing was written. "
                "Fix: --output DIR, or move the folder"
            )
        template, written = _TEMPLATES / kind, []
        for source in sorted(path for path in template.rglob("*") if path.is_file()):
            place = source.relative_to(template)
            # Templates are valid Python: pip compiles them, and linters write caches beside them.
            if any(part.startswith((".", "__pycache__")) for part in place.parts):
                continue
            relative = Path(_renamed(str(place), kind, name))
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).write_text(
                _renamed(source.read_text(encoding="utf-8"), kind, name), encoding="utf-8"
            )
            written.append(relative)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}. Fix: --output DIR") from error
    return written


def _renamed(text: str, kind: str, name: str) -> str:
    """Return a template's text or path with ``name`` in place of ``mine``, in every spelling."""
    snake = _same(name)
    spellings = {
        "geartrain_mine": f"geartrain_{snake}",
        "geartrain-mine": f"geartrain-{snake.replace('_', '-')}",
        "test_mine": f"test_{snake}",
        "MINE": snake.upper(),
        "Mine": "".join(word.capitalize() for word in snake.removesuffix(f"_{kind}").split("_")),
        "mine": name,
    }
    # Lower-case "mine" may be part of another word. "Mine" is a part of MineStrategy and TestMine.
    pattern = r"geartrain[-_]mine|test_mine|MINE|Mine|(?<![a-z])mine(?![a-z])"
    return re.sub(pattern, lambda found: spellings[found[0]], text)


def _say(kind: str, name: str, folder: Path, written: list[Path]) -> None:
    print(f"wrote {folder}/")
    for path in written:
        print(f"  {path}")
    print("next:")
    if kind == _PROJECT:
        first, test = f"cd {shlex.quote(str(folder))}", "pytest"
    else:
        # pip takes a path without a slash for the name of a distribution.
        place = folder if folder.is_absolute() else f"./{folder}"
        first, test = f'pip install -e "{place}[test]"', f"pytest {folder}"
    print(f"  {first}")
    print(f"  {test}")
    print(f"  {_TRY[kind].format(name=name, variable=_same(name).upper())}")
