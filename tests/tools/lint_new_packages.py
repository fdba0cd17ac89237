"""Fail unless ruff and mypy accept what `geartrain new` writes."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: A short and a long name with both dashes: lines must not be too long, and ruff must not join or
#: break them.
SHORT, LONG = "q", "my-own_own_own_own_own_9"
RUFF = (("ruff", "check", "--quiet"), ("ruff", "format", "--diff", "--quiet"))
MYPY = ("mypy", "--no-error-summary", "--cache-dir=../cache")  # types do not depend on the name


def main() -> None:
    failed = []
    # Outside the repository, so that its settings are not found.
    with tempfile.TemporaryDirectory() as folder:
        known = Path(__file__).parents[2] / ".mypy_cache"
        if known.is_dir():
            # torch's cache; mypy reads torch again if the package's settings differ.
            shutil.copytree(known, Path(folder, "cache"))
        for kind in (
            "project",
            "strategy",
            "accelerator",
            "plugin",
            "logger",
            "precision",
            "command",
        ):
            long = LONG.replace("-", "_") if kind == "project" else LONG
            for name, tools in ((SHORT, (*RUFF, MYPY)), (long, RUFF)):
                package = Path(folder, f"{kind} {name}")
                subprocess.run(
                    ["geartrain", "new", kind, name, "--output", package],
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                for tool in tools:
                    if subprocess.run([sys.executable, "-m", *tool], cwd=package).returncode:
                        failed.append(f"{tool[0]}: {kind} {name}")
    if failed:
        sys.exit("\n".join(failed))
    print("the files of geartrain new are clean")


if __name__ == "__main__":
    main()
