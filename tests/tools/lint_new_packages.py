"""Fail unless mypy accepts this repository, and ruff and mypy what `geartrain new` writes.

One process of mypy checks both: it reads torch once, which takes most of its time.
"""

import contextlib
import io
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from geartrain_testing.new import command

ROOT = Path(__file__).parents[2]
#: The kinds of packages -> a short name; mypy accepts each name of a module once.
SHORT = {
    "project": "q",
    "strategy": "r",
    "accelerator": "s",
    "plugin": "t",
    "logger": "u",
    "precision": "v",
    "command": "w",
}
#: A long name with both dashes: lines must not be too long, and ruff must not join or break them.
LONG = "my-own_own_own_own_own_9"
RUFF = (("ruff", "check", "--quiet"), ("ruff", "format", "--diff", "--quiet"))
PLUGIN = "geartrain_testing.mypy_plugin"


def mypy_settings(folder: Path):
    """Return the settings for mypy of the package in a folder."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    return project["tool"]["mypy"]


def main() -> None:
    failed = []
    typed = [path for pattern in mypy_settings(ROOT)["files"] for path in ROOT.glob(pattern)]
    # Outside the repository, so that its settings are not found.
    with tempfile.TemporaryDirectory() as folder:
        for kind, short in SHORT.items():
            for name in (short, LONG.replace("-", "_") if kind == "project" else LONG):
                package = Path(folder, f"{kind} {name}")
                with contextlib.redirect_stdout(io.StringIO()):
                    command("new", [kind, name, "--output", str(package)])
                settings = mypy_settings(package)
                files = settings.pop("files")
                if settings not in ({"strict": True}, {"strict": True, "plugins": [PLUGIN]}):
                    failed.append(f"{kind}: mypy's settings are {settings}, not those of the lint")
                if name == short:
                    typed += [package / file for file in files]
        for tool in RUFF:
            if subprocess.run([sys.executable, "-m", *tool, folder]).returncode:
                failed.append(" ".join(tool))
        mypy = [sys.executable, "-m", "mypy", "--num-workers", "2"]
        if subprocess.run([*mypy, *map(str, typed)], cwd=ROOT).returncode:
            failed.append("mypy")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
