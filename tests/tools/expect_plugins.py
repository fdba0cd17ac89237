"""Fail unless the installed plugins are exactly those of core and of the given plugins/ folders."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def declared(folder: Path) -> list[str]:
    """Return the names of a distribution's plugins."""
    groups = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"].get(
        "entry-points", {}
    )
    # Vocabularies, launchers and libraries cannot be selected.
    others = ("geartrain.hints", "geartrain.implied", "geartrain.launchers", "geartrain.metrics")
    return [
        name
        for group, names in groups.items()
        if group.startswith("geartrain.") and group not in others
        for name in names
    ]


def main() -> None:
    script = (
        "from geartrain.planning.registry import Registry; "
        "print(*sorted({c.name for c in Registry().candidates}))"
    )
    # In an isolated process, so that only installed packages count, not files on the path.
    found = subprocess.run(
        [sys.executable, "-I", "-c", script], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    names = sys.argv[1:]
    folders = [path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml")]
    chosen = [folder for folder in folders if names == ["all"] or folder.name in names]
    wanted = sorted({name for folder in (ROOT / "core", *chosen) for name in declared(folder)})
    if found != wanted:
        sys.exit(f"installed plugins are {found}, but this environment should have {wanted}")
    print("plugins:", *found)


if __name__ == "__main__":
    main()
