"""Fail unless the installed plugins are exactly those of core and of the given plugins/ folders."""

import subprocess
import sys

from distributions import CORE, PLUGINS


def main() -> None:
    script = (
        "from geartrain.planning.registry import Registry; "
        "print(*sorted({c.name for c in Registry().candidates}))"
    )
    # In an isolated process, so that only installed packages count, not files on the path.
    found = subprocess.run(
        [sys.executable, "-I", "-c", script], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    folders = sys.argv[1:]
    chosen = [plugin for plugin in PLUGINS if folders == ["all"] or plugin.folder.name in folders]
    wanted = sorted(
        {
            name
            for distribution in (CORE, *chosen)
            for names in distribution.names.values()
            for name in names
        }
    )
    if found != wanted:
        sys.exit(f"installed plugins are {found}, but this environment should have {wanted}")
    print("plugins:", *found)


if __name__ == "__main__":
    main()
