"""``geartrain new strategy|accelerator|plugin|command NAME``: write a package that pip installs and that works; it is the author's."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

from geartrain import UsageError
from geartrain.plugin_api import KNOWN, Registry, nearest, user_path

#: One folder a kind: a whole package called ``mine``, which is written with another name in place of that.
_TEMPLATES = Path(__file__).with_name("templates")

#: What mean something else where a name is typed: ``--accelerator auto``, ``--model.lr``.
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
#: Lines of code with a longer one would not be what ruff makes of them.
_LONGEST = 24

#: kind -> what its user types to try it.
_TRY = {
    "strategy": "geartrain fit train.py --strategy {name} --devices 2",
    "accelerator": "{variable}_DEVICES=1 geartrain fit train.py --accelerator {name}",
    "plugin": "geartrain fit train.py --plugin {name}",
    "command": "geartrain {name} RUN",
}


def command(name: str, argv: list[str]) -> None:
    """Write the package and print what was written and what to type next.

    Raises:
        UsageError: no such kind, a name that cannot be used, or a folder in which something is.
    """
    parser = argparse.ArgumentParser(
        prog=f"geartrain {name}", allow_abbrev=False, description=__doc__, exit_on_error=False
    )
    parser.add_argument("kind", metavar="KIND", nargs="?", help=", ".join(_TRY))
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="what people will type: lower-case letters and digits, - or _ between them",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="the folder to write; default geartrain-NAME"
    )
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"there is no option {unknown[0]}. Known: --output DIR")
    if given.kind is None:
        raise UsageError(f"a package of which kind? Fix: geartrain {name} {'|'.join(_TRY)} NAME")
    if given.kind not in _TRY:
        raise UsageError(f"there is no kind {given.kind!r}. {nearest(given.kind, _TRY)}")
    if given.name is None:
        raise UsageError(
            f"what is the {given.kind} called? Fix: geartrain {name} {given.kind} NAME"
        )
    _check_name(given.kind, given.name)
    folder = user_path(given.output or f"geartrain-{given.name.replace('_', '-')}", "--output")
    written = _write(given.kind, given.name, folder)
    _say(given.kind, given.name, folder, written)


def _check_name(kind: str, name: str) -> None:
    """Refuse a name that people could not type, or that belongs to something else."""
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        better = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789") or "mine"
        raise UsageError(
            f"{name!r} cannot be a plugin's name: lower-case letters and digits, a letter first, one - or _ between words. Fix: {better}"
        )
    if len(name) > _LONGEST:
        raise UsageError(
            f"{name!r} has {len(name)} characters. Fix: a name of at most {_LONGEST}, because people will type it"
        )
    fix = "Fix: another name"
    if name in _RESERVED:
        raise UsageError(
            f"{name!r} has a meaning of its own on geartrain's command line. {fix}, {name}_2 or my_{name} for one"
        )
    same = _same(name)
    if kind == "plugin":
        try:
            from geartrain_cli.arguments import (
                option_names,
            )  # not above: strategies and accelerators need no parser
        except ModuleNotFoundError as error:  # the Trainer needs torch; without it, a taken name is refused when the plugin is chosen
            if error.name != "torch":
                raise
            taken: frozenset[str] = frozenset()
        else:
            taken = option_names()
        if same in taken:
            raise UsageError(
                f"{name!r} is an option of geartrain's command line (--{name}), and the plugin's options would begin with it. "
                f"{fix}, {name}_2 or my_{name} for example"
            )
    for candidate in Registry().candidates:
        if _same(candidate.name) == same:
            raise UsageError(
                f"{name!r} is installed: it is the {candidate.kind} {candidate.label}. {fix}, or uninstall that one"
            )
    for (other, known), distribution in KNOWN.items():
        if _same(known) == same:
            raise UsageError(
                f"{name!r} is the {other} of {distribution}, which geartrain knows. {fix}, or pip install {distribution}"
            )
    if importlib.util.find_spec(f"geartrain_{same}") is not None:
        raise UsageError(
            f"{name!r}: a package geartrain_{same} is installed, and the {kind}'s would be called the same. {fix}"
        )


def _same(name: str) -> str:
    """What two names have in common that would make packages of one name."""
    return name.lower().replace("-", "_")


# --- writing -------------------------------------------------------------------------------------------------------------


def _write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write the kind's package into ``folder``.

    Returns:
        The files, relative to ``folder``.

    Raises:
        UsageError: the folder is there and not empty, or cannot be written; nothing is overwritten.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"{folder} exists and is not empty; nothing was written. Fix: --output DIR, or move it away"
            )
        template, written = _TEMPLATES / kind, []
        for source in sorted(path for path in template.rglob("*") if path.is_file()):
            place = source.relative_to(template)
            # Templates are valid Python: installing core compiles them, and linters leave their caches.
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
    """A template's text, or a path in it, with ``name`` in place of ``mine`` in every spelling."""
    snake = _same(name)
    spellings = {
        "geartrain_mine": f"geartrain_{snake}",
        "geartrain-mine": f"geartrain-{snake.replace('_', '-')}",
        "test_mine": f"test_{snake}",
        "MINE": snake.upper(),
        "Mine": "".join(word.capitalize() for word in snake.removesuffix(f"_{kind}").split("_")),
        "mine": name,
    }
    # In small letters only as a word: it may be part of another one. MineStrategy and TestMine have it as a part.
    pattern = r"geartrain[-_]mine|test_mine|MINE|Mine|(?<![a-z])mine(?![a-z])"
    return re.sub(pattern, lambda found: spellings[found[0]], text)


def _say(kind: str, name: str, folder: Path, written: list[Path]) -> None:
    print(f"wrote {folder}/")
    for path in written:
        print(f"  {path}")
    print("next:")
    # A path without a slash would be taken for the name of something to download.
    place = folder if folder.is_absolute() else f"./{folder}"
    print(f'  pip install -e "{place}[test]"')
    print(f"  pytest {folder}")
    print(f"  {_TRY[kind].format(name=name, variable=_same(name).upper())}")
