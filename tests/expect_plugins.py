"""Fail unless the installed entry points are exactly core's own and those named: python tests/expect_plugins.py ddp ..."""

import subprocess
import sys
import tomllib
from pathlib import Path

CORE = Path(__file__).parents[1] / "core" / "pyproject.toml"


def main() -> None:
    script = "from geartrain.registry import Registry; print(*sorted({c.name for c in Registry().candidates}))"
    # In a process of its own, away from this folder: what counts is what is installed, not what lies on the path.
    found = subprocess.run([sys.executable, "-I", "-c", script], check=True, capture_output=True, text=True, timeout=60).stdout.split()
    own = tomllib.loads(CORE.read_text(encoding="utf-8"))["project"]["entry-points"]
    wanted = sorted([*sys.argv[1:], *(name for group in own.values() for name in group)])
    if found != wanted:
        sys.exit(f"installed plugins are {found}, and this environment should have {wanted}")
    print("plugins:", *found)


if __name__ == "__main__":
    main()
