"""Fail unless the installed entry points are exactly those named: python tests/expect_plugins.py cpu single ..."""

import subprocess
import sys


def main() -> None:
    script = "from geartrain.registry import Registry; print(*sorted({c.name for c in Registry().candidates}))"
    # In a process of its own, away from this folder: what counts is what is installed, not what lies on the path.
    found = subprocess.run([sys.executable, "-I", "-c", script], check=True, capture_output=True, text=True, timeout=60).stdout.split()
    wanted = sorted(sys.argv[1:])
    if found != wanted:
        sys.exit(f"installed plugins are {found}, and this environment should have {wanted}")
    print("plugins:", *found)


if __name__ == "__main__":
    main()
