"""``pip install``, for tox: other people's packages are installed once, and every environment finds them by a .pth file.

They are 2 GB, torch above all, which would take each environment a minute. Shared they are the same files in the same versions. The
distributions of this repository are an environment's own. Two environments do not share: ``discovery`` has no torch, and ``wheels``
shows each distribution only what it declares.

    python tests/install.py FOLDER PIP'S ARGUMENTS ...
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"


def requirements():
    """Everything that is not of this repository: declared by its distributions, or needed by examples and tests."""
    found = set()
    for path in [ROOT / "core" / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        found.update(project["dependencies"], *project.get("optional-dependencies", {}).values())
    for path in (ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt"):
        found.update(
            line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()
        )
    return sorted(line for line in found if line and not line.startswith(("geartrain", "-e")))


def pip(*arguments):
    subprocess.run([sys.executable, "-I", "-m", "pip", "install", *map(str, arguments)], check=True)


def shared(folder):
    """Return the folder with the packages, made unless it exists."""
    wanted = requirements()
    place = (
        folder
        / hashlib.sha256(
            "\n".join([*wanted, CONSTRAINTS.read_text(encoding="utf-8")]).encode()
        ).hexdigest()[:12]
    )
    if not place.exists():
        half = folder / f".{place.name}-{os.getpid()}"
        # A module is compiled when it is first imported: most of torch never is.
        pip("--quiet", "--no-compile", "--constraint", CONSTRAINTS, "--target", half, *wanted)
        try:
            half.rename(place)  # whole or not at all
        except OSError:  # another environment was faster
            shutil.rmtree(half)
    return place


def main():
    folder, *arguments = sys.argv[1:]
    place = shared(Path(folder))
    Path(sysconfig.get_path("purelib"), "shared.pth").write_text(f"{place}\n", encoding="utf-8")
    pip(
        "--no-deps", "--no-build-isolation", *arguments
    )  # all that these need is in the shared folder


if __name__ == "__main__":
    main()
