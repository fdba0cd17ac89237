"""Write the lists of distributions from the folders core/ and plugins/*/*/.

python tests/tools/distributions.py          rewrite the lists
python tests/tools/distributions.py --check  exit with 1, and name the files, if that would change
                                             a file

The lists are between lines with "generated: distributions" and "end of distributions": the extras
of core, the names in errors, the editable installs of tests/requirements.txt, and README's table.
A row of the table is what the distribution's pyproject.toml provides and describes, and the pages
of docs/ that its README.md names.
"""

import re
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: Group of entry points whose names users type -> their kind.
KINDS = {
    "geartrain.accelerators": "accelerator",
    "geartrain.strategies": "strategy",
    "geartrain.precisions": "precision",
    "geartrain.plugins": "plugin",
    "geartrain.commands": "command",
}


class Distribution(NamedTuple):
    """A folder with a pyproject.toml."""

    folder: Path
    name: str
    description: str
    #: Kind -> the names of entry points.
    names: dict[str, list[str]]


def read(folder):
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    groups = project.get("entry-points", {})
    names = {kind: list(groups[group]) for group, kind in KINDS.items() if group in groups}
    return Distribution(folder, project["name"], project["description"], names)


CORE = read(ROOT / "core")
#: Those beside core, by name.
PLUGINS = sorted(
    (read(path.parent) for path in ROOT.glob("plugins/*/*/pyproject.toml")),
    key=lambda distribution: distribution.name,
)


def standard():
    """Return the names in the extra ``standard``, which is written by hand."""
    project = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text("utf-8"))["project"]
    lines = project["optional-dependencies"]["standard"]
    return {re.match(r"[a-z-]+", line)[0] for line in lines}


def extras():
    for plugin in PLUGINS:
        yield f'{plugin.name.removeprefix("geartrain-")} = ["{plugin.name}>=0.1,<0.2"]'


def known():
    """Yield the lines of ``geartrain.errors.known.PROVIDED``."""
    for plugin in PLUGINS:
        for kind, names in plugin.names.items() or [("", [])]:
            start = f"{plugin.name} {kind} "
            for line in textwrap.wrap(" ".join(sorted(names)), 100 - len(start)) or [""]:
                yield f"{start}{line}".rstrip()


def installs():
    """Yield the lines of tests/requirements.txt: what requirements.txt does not install."""
    first = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    for plugin in PLUGINS:
        line = f"-e ./{plugin.folder.relative_to(ROOT).as_posix()}"
        if line not in first:
            yield line


def table():
    """Yield README's table."""
    yield "| distribution | contents | page | `[standard]` |"
    yield "|---|---|---|---|"
    for distribution in (CORE, *PLUGINS):
        provided = [
            f"{kind if len(names) == 1 else plural(kind)} {' '.join(f'`{n}`' for n in names)}"
            for kind, names in distribution.names.items()
        ]
        head, _, tail = distribution.description.rstrip(".").partition(": ")
        contents = ": ".join(["; ".join(provided), tail or head] if provided else [tail or head])
        readme = (distribution.folder / "README.md").read_text("utf-8")
        pages = dict.fromkeys(re.findall(r"(?<!/)\bdocs/([a-z-]+)\.md", readme))
        links = ", ".join(f"[{page.replace('-', ' ')}](docs/{page}.md)" for page in pages)
        mark = "yes" if distribution.name in standard() else ""
        row = f"| `{distribution.name}` | {contents} | {links} | {mark} |"
        yield re.sub(" +", " ", row)


def plural(kind):
    return kind.removesuffix("y") + "ies" if kind.endswith("y") else f"{kind}s"


#: File -> the lines of its list.
LISTS = {
    "core/pyproject.toml": extras,
    "core/src/geartrain/errors/known.py": known,
    "tests/requirements.txt": installs,
    "README.md": table,
}


def changed():
    """Yield each file that differs from the folders, and its new text."""
    for name, lines in LISTS.items():
        text = (ROOT / name).read_text("utf-8")
        head, begin, rest = re.split(r"(?m)(^.*generated: distributions.*\n\n?)", text, maxsplit=1)
        _, end, tail = re.split(r"(?m)(^\n?.*end of distributions)", rest, maxsplit=1)
        new = "".join([head, begin, *(f"{line}\n" for line in lines()), end, tail])
        if new != text:
            yield name, new


def main():
    files = dict(changed())
    if "--check" not in sys.argv[1:]:
        for name, text in files.items():
            (ROOT / name).write_text(text, "utf-8")
    elif files:
        sys.exit(f"{', '.join(files)} differ. Fix: python tests/tools/distributions.py")


if __name__ == "__main__":
    main()
