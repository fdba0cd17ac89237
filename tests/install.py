"""``pip install``, for tox: torch is installed once, and every environment finds it by a .pth file.

Torch and what it brings are 900 MB, which take each environment twenty seconds to unpack and to compile. Shared they are the same files
in the same versions. All else is an environment's own, and one environment (``accelerators``) shares nothing: a distribution that did
not declare its need for torch would fail there.

    python tests/install.py FOLDER PIP'S ARGUMENTS ...
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pip(*arguments):
    subprocess.run([sys.executable, "-I", "-m", "pip", "install", *map(str, arguments)], check=True)


def shared(folder):
    """The folder with the tested torch, made unless it is there."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (torch,) = [line for line in constraints.splitlines() if line.startswith("torch==")]
    place = folder / torch
    if not place.exists():
        half = folder / f".{torch}-{os.getpid()}"
        pip("--quiet", "--constraint", ROOT / "constraints.txt", "--target", half, "torch")
        try:
            half.rename(place)  # whole or not at all
        except OSError:  # another environment was faster
            shutil.rmtree(half)
    return place


def main():
    folder, *arguments = sys.argv[1:]
    place = shared(Path(folder))
    Path(sysconfig.get_path("purelib"), "shared_torch.pth").write_text(f"{place}\n", encoding="utf-8")
    pip(*arguments)


if __name__ == "__main__":
    main()
