"""``pip install`` for tox: install third-party packages once; environments use a .pth file.

The packages take 2 GB, most of it torch, and would take each environment a minute. All environments
share the same files and versions. Only the distributions of this repository are installed in each
environment. Two environments do not share: ``discovery`` has no torch, and ``wheels`` has for each
distribution only its declared requirements.

The folder is called ``site-packages``, because hypothesis reads the constants of all modules in
other folders, which takes each process 10 s.

    python tests/tools/install.py FOLDER PIP'S ARGUMENTS ...
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def requirements():
    """Return all third-party requirements of the distributions, the examples and the tests."""
    found = set()
    for path in [ROOT / "core" / "pyproject.toml", *ROOT.glob("plugins/*/*/pyproject.toml")]:
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
    """Return the folder with the packages; install them if it does not exist."""
    wanted = requirements()
    place = (
        folder
        / hashlib.sha256(
            "\n".join([*wanted, CONSTRAINTS.read_text(encoding="utf-8")]).encode()
        ).hexdigest()[:12]
    )
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one environment installs, and the others wait
        if not place.exists():
            half = folder / f".{place.name}-{os.getpid()}"
            # Modules are compiled at their first import, because most of torch is never imported.
            pip("--quiet", "--no-compile", "--constraint", CONSTRAINTS, "--target", half, *wanted)
            try:
                half.rename(place)  # complete or not at all
            except OSError:  # another environment was faster
                shutil.rmtree(half)
    return place


def editable(arguments, folder):
    """Replace the arguments ``-e SOURCE`` by wheels, and files of ``-r`` by their ``-e`` lines.

    This process builds the wheels; pip would start two processes for each. The other lines of the
    files are requirements that the shared folder has.
    """
    from hatchling.builders.wheel import WheelBuilder

    found, given = [], iter(arguments)
    for argument in given:
        if argument == "-r":
            lines = Path(next(given)).read_text(encoding="utf-8").splitlines()
            sources = [line.removeprefix("-e ") for line in lines if line.startswith("-e ")]
        elif argument == "-e":
            sources = [next(given)]
        else:
            found.append(argument)
            continue
        for source in sources:
            builder = WheelBuilder(str(Path(source).absolute()))
            found += builder.build(directory=folder, versions=["editable"])
    return found


def main():
    folder, *arguments = sys.argv[1:]
    place = shared(Path(folder))
    Path(sysconfig.get_path("purelib"), "shared.pth").write_text(f"{place}\n", encoding="utf-8")
    sys.path.append(str(place))
    with tempfile.TemporaryDirectory() as wheels:
        # The requirements are in the shared folder.
        pip("--no-deps", *editable(arguments, wheels))


if __name__ == "__main__":
    main()
