"""An environment of a page's own: what is installed here, and room for what the page installs."""

from __future__ import annotations

import os
import site
import sysconfig
import venv
from pathlib import Path

#: Each is ``NAME [ARGUMENTS]`` on the page, and runs this in the page's environment.
_SCRIPTS = {
    "geartrain": """
import sys
from geartrain.commands import main
sys.exit(main())
""",
    # As options, because pip reads PIP_NO_BUILD_ISOLATION=1 as "isolate" (pypa/pip#5735).
    "pip": """
import sys
from pip._internal.cli.main import main
arguments = sys.argv[1:]
if arguments[:1] == ["install"]:
    arguments[1:1] = ["--no-index", "--no-build-isolation"]
sys.exit(main(arguments))
""",
}


def make_environment(folder: Path) -> tuple[Path, dict[str, str]]:
    """A virtual environment without network that sees what the running interpreter sees.

    Returns:
        Its python, and the environment variables to run things in it.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    scripts, packages = (Path(sysconfig.get_path(name, "venv", vars={"base": str(folder)})) for name in ("scripts", "purelib"))
    python = scripts / "python"
    # addsitedir and not the folders alone: an editable geartrain is a .pth file in one of them.
    here = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (packages / "running_interpreter.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
    for name, code in _SCRIPTS.items():
        script = scripts / name
        script.write_text(f"#!{python}\n{code.lstrip()}")
        script.chmod(0o755)
    return python, {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "GEARTRAIN_", "PYTHON"))},
        "PATH": os.pathsep.join([str(scripts), os.environ.get("PATH", os.defpath)]),
        "VIRTUAL_ENV": str(folder),
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",  # two tests' threads would wait for each other's cores
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INDEX": "1",
        "PIP_QUIET": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
    }
