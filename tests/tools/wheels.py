"""Test each distribution alone, from its wheel.

    python tests/tools/wheels.py FOLDER [NAME ...]

pip builds every wheel once. Then each wheel gets a new environment with its declared requirements
and nothing else: pip installs the wheel and the other wheels of this repository that it requires;
third-party packages are linked from the folder of tests/tools/install.py. In this environment every
entry point is loaded, and each plugin runs a fit of two steps, with geartrain-cli installed for it.
A script tests core alone. An undeclared dependency cannot be imported. A strategy for several ranks
starts them.
"""

import collections
import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
GROUPS = {
    f"geartrain.{kind}s": kind for kind in ("accelerator", "command", "plugin", "precision")
} | {"geartrain.strategies": "strategy"}
#: Required options of plugins.
OPTIONS = {
    "accumulation_scheduler": ["--accumulation_scheduler.scheduling", '{"0": 2}'],
    "compile": ["--compile.backend", "eager"],  # inductor needs a C++ compiler and a minute
    "early_stopping": ["--early_stopping.monitor", "train_loss"],
    "prediction_writer": ["--prediction_writer.output_dir", "predictions"],
    "swa": ["--swa.swa_lrs", "0.1", "--swa.swa_epoch_start", "1"],
    "timer": ["--timer.duration", "00:01:00:00"],
    "wandb": ["--wandb.mode", "offline"],
}
#: Plugins that a module or an option selects -> the option, and changes that make TARGET such a
#: module.
ADDED = {
    "manual_optimisation": (
        [],
        {
            "    def __init__(self):\n        super": (
                "    automatic_optimization = False\n\n    def __init__(self):\n        super"
            ),
            "return loss": "self.manual_backward(loss)\n        self.optimizers().step()",
        },
    ),
    "overrides": (
        [],
        {
            "    def configure_optimizers": (
                "    def backward(self, loss):\n        loss.backward()\n\n"
                "    def configure_optimizers"
            )
        },
    ),
    "overfit": (["--overfit-batches", "1"], {}),
    "sync_batchnorm": (["--sync-batchnorm", "true"], {}),
}
#: Plugins that this machine may be unable to use -> words of the error.
UNUSABLE = {
    "cuda": "geartrain-cuda[cuda] cannot be used here",
    "mps": "geartrain-mps[mps] cannot be used here",
    "horovod": "not installed",
}
#: The command line that tests each command; the fits test ``fit``.
COMMANDS = {
    **{name: ["target.py", "--help"] for name in ("fit", "validate", "test", "predict")},
    "explain": ["target.py", "--accelerator", "cpu"],
    "plugins": ["--json"],
    "doctor": ["--json"],
    "port": ["target.py"],
    "report": ["run"],
    "tune": ["batch-size", "target.py", "--accelerator", "cpu", "--max-trials", "1"],
    "conformance": ["single", "--devices", "1", "-k", "metadata"],
    "new": ["plugin", "mine", "--output", "mine"],
}
#: Accepted exit codes of a command: doctor ends with 1 if this machine needs a fix.
CODES = {"doctor": (0, 1)}
#: Packages that an example needs in addition to core.
DIGITS = Requirement("scikit-learn")
TARGET = """
import torch
import geartrain as gt


class Line(gt.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.backbone = torch.nn.Identity()  # for backbone_finetuning

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(gt.DataModule):
    def __init__(self, batch_size: int = 4):
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(16, 1), batch_size=self.batch_size)


if __name__ == "__main__":
    gt.cli(Line, Data)
"""
#: A run that the command report shows.
METRICS = '{"step": 1, "stage": "train", "train_loss": 0.5}\n'
LOAD = """
import json, sys
from importlib.metadata import distribution
for name in sys.argv[1:]:
    for point in distribution(name).entry_points:
        if point.group != "geartrain.implied":  # names of plugins
            point.load()
from geartrain.planning.registry import Registry
print(json.dumps(sorted(found.name for found in Registry().candidates)))
"""
#: A script for core alone.
ALONE = """
import sys
import geartrain as gt

sys.path.insert(0, sys.argv[1])
from digits import Digits, DigitsData

trainer = gt.Trainer(accelerator="cpu", max_epochs=2, seed=1, output="digits")
trainer.fit(Digits(), datamodule=DigitsData())
"""
#: A user's own loop, for geartrain-session.
LOOP = """
import torch
import geartrain as gt

with gt.Session(accelerator="cpu") as session:
    model = torch.nn.Linear(1, 1)
    model, optimizer = session.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    print("steps:", session.global_step)
"""
#: Names of tools that a user of core alone may import -> the distribution in the install line.
TOOLS = {
    "geartrain.Session": "geartrain-session",
    "geartrain.Fabric": "geartrain-session",
    "geartrain.CombinedLoader": "geartrain-callbacks",
    "geartrain.cli": "geartrain-cli",
    "geartrain.callbacks.EarlyStopping": "geartrain-callbacks",
    "geartrain.parallel.ProcessGroupStrategy": "geartrain-parallel",
    "geartrain.testing.run_plugin": "geartrain-testing",
    "geartrain.tuning.Tuner": "geartrain-tools",
    "geartrain.loggers.CSVLogger": "geartrain-callbacks",
    "geartrain.strategies.DDPStrategy": "geartrain-ddp",
}


def call(*command, cwd=None, may_fail=False, seconds=300):
    """Run a command; return the finished process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GEARTRAIN_", "PYTHON"))
    }
    command = [str(word) for word in command]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode and not may_fail:
        raise RuntimeError(
            f"{' '.join(command)}\nended with exit code {done.returncode}:\n"
            f"{done.stdout}{done.stderr}"
        )
    return done


# --- an environment -------------------------------------------------------------------------------


class Packages:
    """The packages in the shared folder, by name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known = {
            canonicalize_name(found.metadata["Name"]): found
            for found in distributions(path=[str(folder)])
        }
        self._owners = collections.Counter(
            top for found in self._known.values() for top in self._tops(found)
        )

    @staticmethod
    def _tops(found: Distribution):
        return {file.parts[0] for file in found.files or ()} - {"..", "bin", "__pycache__"}

    def required(
        self, requirement: Requirement, own: dict[str, Distribution], seen: set[tuple[str, str]]
    ):
        """Return the names of all packages that a requirement needs.

        Args:
            own: this repository's distributions.
            seen: names found so far; it grows.
        """
        name = canonicalize_name(requirement.name)
        found = own.get(name) or self._known[name]
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in found.requires or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    self.required(needed, own, seen)
        return {name for name, _ in seen}

    def link(self, name: str, there: Path):
        """Link a package into the folder ``there``, so that Python and pip find it."""
        found = self._known[name]
        for top in self._tops(found):
            if self._owners[top] == 1:
                (there / top).symlink_to(self.folder / top)
                continue
            for file in found.files:  # several distributions may share a namespace
                if file.parts[0] == top:
                    (there / file).parent.mkdir(parents=True, exist_ok=True)
                    (there / file).symlink_to(self.folder / file)


def purelib(venv: Path):
    """Return the folder of an environment's packages."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(venv), "platbase": str(venv)}))


def environment(
    folder: Path,
    requirements: list[Requirement],
    wheels: Path,
    own: dict[str, Distribution],
    packages: Packages,
):
    """Create an environment in which pip installs wheels; return its folder of commands."""
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    scheme = {"base": str(folder), "platbase": str(folder)}
    for name in (
        set().union(*(packages.required(one, own, set()) for one in requirements)) - own.keys()
    ):
        packages.link(name, purelib(folder))
    scripts = Path(sysconfig.get_path("scripts", "venv", scheme))
    # --no-index: requirements are in the folder of wheels or linked; pip reports missing ones.
    install = ("install", "--quiet", "--no-index", "--find-links", wheels, *requirements)
    call(
        sys.executable,
        "-I",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        scripts / "python",
        *install,
    )
    return scripts


# --- one distribution -----------------------------------------------------------------------------


def check(
    requirement: Requirement,
    folder: Path,
    wheels: Path,
    own: dict[str, Distribution],
    packages: Packages,
):
    """Install a distribution and test its plugins and commands. Return the line to print."""
    begun = time.monotonic()
    folder.mkdir()
    (folder / "target.py").write_text(TARGET, encoding="utf-8")
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text(METRICS, encoding="utf-8")
    is_alone = str(requirement) == "geartrain"
    # geartrain-cli runs the plugins of the other distributions.
    requirements = [requirement] if is_alone else [requirement, Requirement("geartrain-cli")]
    scripts = environment(folder / "venv", requirements, wheels, own, packages)
    name = canonicalize_name(requirement.name)
    installed = (
        set().union(*(packages.required(one, own, set()) for one in requirements)) & own.keys()
    )
    declared = {one: list(own[one].entry_points) for one in installed}
    expected = sorted(
        point.name for points in declared.values() for point in points if point.group in GROUPS
    )
    found = json.loads(
        call(scripts / "python", "-c", LOAD, *installed, cwd=folder).stdout.splitlines()[-1]
    )
    assert found == expected, f"installed plugins are {found}, not {expected}"
    tried = own.keys() & extras(own, requirement) if requirement.extras else {name}
    points = [point for one in sorted(tried) for point in declared[one]]
    names = {
        kind: [point.name for point in points if GROUPS.get(point.group) == kind]
        for kind in GROUPS.values()
    }
    if is_alone:
        facts = ", ".join(alone(scripts, folder, packages))
        return f"{requirement}: {facts}, {time.monotonic() - begun:.0f} s"
    said = []
    for one in names["strategy"]:
        ranks = [] if one == "single" else ["--devices", "2"]
        said.append(fit(scripts, folder, ["--accelerator", "cpu", "--strategy", one, *ranks], one))
    said += [fit(scripts, folder, ["--accelerator", one], one) for one in names["accelerator"]]
    selected = [one for one in names["plugin"] if one not in ADDED]
    if selected:
        chosen = [word for one in selected for word in ("--plugin", one, *OPTIONS.get(one, ()))]
        said.append(fit(scripts, folder, ["--accelerator", "cpu", *chosen], "+".join(selected)))
    said += [
        fit(
            scripts,
            folder,
            ["--accelerator", "cpu", *ADDED[one][0]],
            one,
            added_target(folder, one),
        )
        for one in names["plugin"]
        if one in ADDED
    ]
    for one in names["command"]:
        done = call(scripts / "geartrain", one, *COMMANDS[one], cwd=folder, may_fail=True)
        assert done.returncode in CODES.get(one, (0,)), (
            f"{one} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
        said.append(one)
    if requirement.name == "geartrain-cli":
        missing = {
            point.name: other
            for other in sorted(own.keys() - installed)
            for point in own[other].entry_points
            if point.group == "geartrain.commands"
        }
        said.append(missing_commands(scripts, folder, missing))
    if requirement.name == "geartrain-session":
        (folder / "loop.py").write_text(LOOP, encoding="utf-8")
        assert call(scripts / "python", "loop.py", cwd=folder).stdout == "steps: 1\n"
        said.append("a loop")
    if requirement.name == "geartrain-parallel":
        call(scripts / "python", "-c", "from geartrain.parallel import *", cwd=folder)
        said.append("its names")
    return f"{requirement}: {', '.join(said)}, {time.monotonic() - begun:.0f} s"


def extras(own: dict[str, Distribution], requirement: Requirement):
    """Return the names of the distributions in the extras of a requirement."""
    lines = [Requirement(line) for line in own[canonicalize_name(requirement.name)].requires or ()]
    wanted = [
        line.name
        for line in lines
        if line.marker and any(line.marker.evaluate({"extra": one}) for one in requirement.extras)
    ]
    return {canonicalize_name(name) for name in wanted}


def alone(scripts: Path, folder: Path, packages: Packages):
    """Train the digits example with core alone, and import each tool. Yield facts to print."""
    for name in packages.required(DIGITS, {}, set()):
        with contextlib.suppress(FileExistsError):
            packages.link(name, purelib(folder / "venv"))
    call(scripts / "python", "-c", ALONE, ROOT / "examples", cwd=folder)
    assert (folder / "digits" / "last.ckpt").exists()
    yield "digits"
    for tool, home in TOOLS.items():
        module, _, name = tool.rpartition(".")
        done = call(
            scripts / "python", "-c", f"from {module} import {name}", cwd=folder, may_fail=True
        )
        assert done.stderr.splitlines()[-1].endswith(
            f"is not installed. Fix: pip install {home}"
        ), f"{tool}: {done.stderr}"
    done = call(scripts / "geartrain", "fit", "target.py", cwd=folder, may_fail=True)
    said = "geartrain: the command line is not installed. Fix: pip install geartrain-cli\n"
    assert (done.returncode, done.stderr) == (2, said), done.stderr
    yield f"{len(TOOLS) + 1} tools that are missing"


def missing_commands(scripts: Path, folder: Path, missing: dict[str, str]):
    """Call commands of other distributions, and manual optimisation, without them installed.

    Return facts to print.

    Args:
        missing: a command -> its distribution.
    """
    for command, home in missing.items():
        done = call(scripts / "geartrain", command, cwd=folder, may_fail=True)
        said = (
            f"geartrain {command}: geartrain {command} is not installed.\nFix: pip install {home}\n"
        )
        assert (done.returncode, done.stderr) == (2, said), f"{command}: {done.stderr}"
    done = call(
        scripts / "geartrain",
        "fit",
        added_target(folder, "manual_optimisation"),
        cwd=folder,
        may_fail=True,
    )
    said = (
        "Line.automatic_optimization = False needs geartrain-callbacks.\n"
        "Fix: pip install geartrain-callbacks\n"
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(said), done.stderr
    return f"{len(missing)} commands and manual optimisation that are missing"


def added_target(folder: Path, plugin: str):
    """Write a target whose module needs a plugin of ``ADDED``; return its name."""
    changed = TARGET
    for before, after in ADDED[plugin][1].items():
        changed = changed.replace(before, after)
    (folder / f"{plugin}.py").write_text(changed, encoding="utf-8")
    return f"{plugin}.py"


def fit(scripts: Path, folder: Path, chosen: list[str], label: str, target: str = "target.py"):
    """Train two steps. Return facts to print. If the machine cannot run it, check the error."""
    output = folder / f"run of {label}"
    done = call(
        scripts / "geartrain",
        "fit",
        target,
        "--max-steps",
        "2",
        "--output",
        output,
        *chosen,
        cwd=folder,
        may_fail=True,
    )
    if (
        label in UNUSABLE
        and done.returncode == 2
        and UNUSABLE[label] in " ".join(done.stderr.split())
    ):
        return f"{label} (refused)"
    if done.returncode:
        raise RuntimeError(
            f"{label}: the fit ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 2, summary
    return label


def main():
    folder = Path(sys.argv[1])
    wheels, sources = (
        folder / "wheels",
        [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))],
    )
    pip = (sys.executable, "-I", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    with ThreadPoolExecutor(2) as pool:
        halves = (sources[::2], sources[1::2])
        list(pool.map(lambda half: call(*pip, "--wheel-dir", wheels, *half), halves))
    own = {}
    for wheel in wheels.glob("*.whl"):
        (found,) = distributions(path=[str(wheel)])
        own[canonicalize_name(found.metadata["Name"])] = found
    assert len(own) == len(sources), sorted(own)
    packages = Packages(Path(distribution("torch").locate_file("")))
    wanted = [Requirement(name) for name in sys.argv[2:] or [*sorted(own), "geartrain[standard]"]]
    failed = False
    with ThreadPoolExecutor(2) as pool:
        for number, result in [
            (n, pool.submit(check, one, folder / str(n), wheels, own, packages))
            for n, one in enumerate(wanted)
        ]:
            try:
                print(result.result(), flush=True)
            except Exception as error:
                failed = True
                print(f"{wanted[number]}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
