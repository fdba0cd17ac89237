"""Fail unless ruff and mypy have nothing to say of what `geartrain new` writes: python tests/lint_new_packages.py"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

#: A short and a long name, and both dashes: lines must neither be too long nor such that ruff would join or break them.
NAMES = ("q", "my-own_own_own_own_own_9")
TOOLS = (("ruff", "check", "--quiet"), ("ruff", "format", "--diff", "--quiet"), ("mypy", "--no-error-summary", "--cache-dir=../cache"))


def main() -> None:
    failed = []
    # Outside the repository, whose settings would be found too.
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, name) in enumerate(itertools.product(("strategy", "accelerator", "plugin"), NAMES)):
            package = Path(folder, str(number))
            subprocess.run(["geartrain", "new", kind, name, "--output", package], check=True, stdout=subprocess.DEVNULL)
            for tool in TOOLS:
                if subprocess.run([sys.executable, "-m", *tool], cwd=package).returncode:
                    failed.append(f"{tool[0]}: {kind} {name}")
    if failed:
        sys.exit("\n".join(failed))
    print("what geartrain new writes is clean")


if __name__ == "__main__":
    main()
