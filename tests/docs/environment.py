"""An environment for one page: the installed packages, and room for packages of the page."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import venv
from pathlib import Path

from warm import Warm

_GEARTRAIN = """
import sys
from geartrain.commands import main
sys.exit(main())
"""
# As options, because pip reads PIP_NO_BUILD_ISOLATION=1 as "isolate" (pypa/pip#5735).
_PIP = """
import sys
from pip._internal.cli.main import main
arguments = sys.argv[1:]
if arguments[:1] == ["install"]:
    arguments[1:1] = ["--no-index", "--no-build-isolation"]
sys.exit(main(arguments))
"""


def variables() -> dict[str, str]:
    """Return the environment variables for programs of a page."""
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "GEARTRAIN_", "PYTHON"))
        },
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",  # two tests' threads would compete for the cores
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INDEX": "1",
        "PIP_QUIET": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
    }


def make_environment(folder: Path, warm: Warm | None) -> tuple[Path, dict[str, str]]:
    """Create a virtual environment without network that includes the current environment.

    Args:
        folder: the folder of the environment.
        warm: if given, a server that forks a process for each ``python FILE`` and ``geartrain``.

    Returns:
        Its python, and the environment variables for its programs.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    scripts, packages = (
        Path(sysconfig.get_path(name, "venv", vars={"base": str(folder)}))
        for name in ("scripts", "purelib")
    )
    python = scripts / f"python{sys.version_info.major}"
    # addsitedir, because an editable geartrain is a .pth file in one of the folders.
    here = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (packages / "running_interpreter.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in here)
    )
    _write(scripts / "pip", python, _PIP)
    if warm is None:
        _write(scripts / "geartrain", python, _GEARTRAIN)
    else:
        (folder / "programs").mkdir()
        warm.script(
            scripts / "geartrain",
            _write(folder / "programs" / "geartrain", python, _GEARTRAIN),
            python,
        )
        (scripts / "python").unlink()
        warm.script(scripts / "python", python=python)
    path = os.pathsep.join([str(scripts), os.environ.get("PATH", os.defpath)])
    return scripts / "python", {**variables(), "PATH": path, "VIRTUAL_ENV": str(folder)}


def _write(script: Path, python: Path, code: str) -> Path:
    script.write_text(f"#!{python}\n{code.lstrip()}")
    script.chmod(0o755)
    return script
