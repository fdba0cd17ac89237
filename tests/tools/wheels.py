"""Test each distribution alone, from its wheel.

    python tests/tools/wheels.py FOLDER [NAME ...]

Every wheel is built once, and pip installs all of them into one folder. Then each wheel gets a new
environment with its declared requirements and nothing else: links to the packages of that folder,
and of the folder of tests/tools/install.py. In this environment every entry point is loaded, and
each plugin runs a fit of two steps, with geartrain-cli installed for it. A script tests core alone.
An undeclared dependency cannot be imported. A strategy for several ranks starts them.

A process that has imported torch and the requirements of geartrain-cli forks the commands.
"""

import collections
import contextlib
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "shared"))

from sites import build, variables  # noqa: E402
from warm import AVAILABLE, Warm  # noqa: E402

CLI = Requirement("geartrain-cli")
GROUPS = {
    f"geartrain.{kind}s": kind for kind in ("accelerator", "command", "plugin", "precision")
} | {"geartrain.strategies": "strategy"}
#: Required options of plugins and strategies.
OPTIONS = {
    "accumulation_scheduler": ["--accumulation_scheduler.scheduling", '{"0": 2}'],
    "activation_checkpointing": ["--activation_checkpointing.units", "Linear"],
    "chaos": ["--chaos.slow", "rank=0,step=1,seconds=0.1"],
    "compile": ["--compile.backend", "eager"],  # inductor needs a C++ compiler and a minute
    "early_stopping": ["--early_stopping.monitor", "train_loss"],
    "locked": ["--locked.file", "geartrain.lock"],
    "prediction_writer": ["--prediction_writer.output_dir", "predictions"],
    "remote": ["--remote.url", "memory://run"],
    "swa": ["--swa.swa_lrs", "0.1", "--swa.swa_epoch_start", "1"],
    "tensor_parallel": ["--strategy.colwise", "net"],
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
    "detect_anomaly": (["--detect-anomaly", "true"], {}),
    "deterministic": (["--deterministic", "true"], {}),
    "evaluation_outputs": (
        [],
        {
            "    def configure_optimizers": (
                "    def validation_epoch_end(self, outputs):\n        pass\n\n"
                "    def configure_optimizers"
            )
        },
    ),
    "overfit": (["--overfit-batches", "1"], {}),
    "provenance": ([], {}),
    "restarts": (["--max-restarts", "1"], {}),
    "reload_dataloaders": (["--reload-dataloaders-every-n-epochs", "1"], {}),
    "timed_validation": (["--val-check-interval", "00:01:00:00"], {}),
    "training_outputs": (
        [],
        {
            "    def configure_optimizers": (
                "    def training_epoch_end(self, outputs):\n        assert outputs\n\n"
                "    def configure_optimizers"
            )
        },
    ),
    "sync_batchnorm": (["--sync-batchnorm", "true"], {}),
}
#: Plugins that this machine may be unable to use -> words of the error.
UNUSABLE = {
    "cuda": "geartrain-cuda[cuda] cannot be used here",
    "mps": "geartrain-mps[mps] cannot be used here",
    "npu": "geartrain-devices[npu] cannot be used here",
    "tpu": "geartrain-tpu[tpu] cannot be used here",
    "xpu": "geartrain-devices[xpu] cannot be used here",
    "horovod": "not installed",
}
#: The command line that tests each command; the fits test ``fit``.
COMMANDS = {
    **{name: ["target.py", "--help"] for name in ("fit", "validate", "test", "predict")},
    "explain": ["target.py", "--accelerator", "cpu"],
    "plugins": ["--json"],
    "doctor": ["--json"],
    "ckpt": ["--help"],
    "compare": ["--help"],
    "verify": ["--help"],
    "scale": ["--help"],
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
IMPORT = """
import json, sys

def error_of(tool):
    module, _, name = tool.rpartition(".")
    try:
        exec(f"from {module} import {name}")
    except ImportError as error:
        return str(error)
    return ""

print(json.dumps([error_of(tool) for tool in sys.argv[1:]]))
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
    command = [str(word) for word in command]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=variables(),
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
    """The packages in some folders, by name."""

    def __init__(self, *folders: Path):
        self._known = {
            canonicalize_name(found.metadata["Name"]): found
            for found in distributions(path=list(map(str, folders)))
        }
        self._owners = collections.Counter(
            top for found in self._known.values() for top in self._tops(found)
        )

    def __getitem__(self, name: str) -> Distribution:
        return self._known[name]

    @staticmethod
    def _tops(found: Distribution):
        return {file.parts[0] for file in found.files or ()} - {"..", "bin", "__pycache__"}

    def required(self, *requirements: Requirement, seen: set[tuple[str, str]] | None = None):
        """Return the names of all packages that requirements need.

        Args:
            seen: names found so far; it grows.
        """
        seen = set() if seen is None else seen
        for requirement in requirements:
            name = canonicalize_name(requirement.name)
            found = self._known[name]
            assert requirement.specifier.contains(found.version, prereleases=True), (
                f"{requirement}: {found.version}"
            )
            for extra in ("", *requirement.extras):
                if (name, extra) in seen:
                    continue
                seen.add((name, extra))
                for line in found.requires or ():
                    needed = Requirement(line)
                    if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                        self.required(needed, seen=seen)
        return {name for name, _ in seen}

    def link(self, name: str, there: Path):
        """Link a package into the folder ``there``, so that Python finds it."""
        found = self._known[name]
        for top in self._tops(found):
            if self._owners[top] == 1:
                (there / top).symlink_to(found.locate_file(top))
                continue
            for file in found.files:  # several distributions may share a namespace
                if file.parts[0] == top:
                    (there / file).parent.mkdir(parents=True, exist_ok=True)
                    (there / file).symlink_to(found.locate_file(file))


class Environment:
    """A Python environment with packages and the command ``geartrain``.

    Args:
        warm: the process that forks the commands; ``None``: Python runs them.
    """

    def __init__(self, folder: Path, names: set[str], packages: Packages, warm: Warm | None):
        call(sys.executable, "-m", "venv", "--without-pip", folder)
        scheme = {"base": str(folder), "platbase": str(folder)}
        self.purelib = Path(sysconfig.get_path("purelib", "venv", scheme))
        for name in names:
            packages.link(name, self.purelib)
        scripts = Path(sysconfig.get_path("scripts", "venv", scheme))
        self.python = scripts / "python"
        (point,) = packages["geartrain"].entry_points.select(group="console_scripts")
        script = scripts / point.name
        script.write_text(
            f"#!{self.python}\nimport sys\nfrom {point.module} import {point.attr}\n"
            f"sys.exit({point.attr}())\n",
            encoding="utf-8",
        )
        script.chmod(0o755)
        self.geartrain = script
        if warm is not None:
            self.geartrain = warm.script(scripts / "warm_geartrain", script, self.python)
            self.python = warm.script(scripts / "warm_python", python=self.python)


# --- one distribution -----------------------------------------------------------------------------


def check(
    requirement: Requirement, folder: Path, own: set[str], packages: Packages, warm: Warm | None
):
    """Test the plugins and commands of a distribution. Return the line to print.

    Args:
        own: the names of this repository's distributions.
    """
    begun = time.monotonic()
    folder.mkdir()
    (folder / "target.py").write_text(TARGET, encoding="utf-8")
    (folder / "load.py").write_text(LOAD, encoding="utf-8")
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text(METRICS, encoding="utf-8")
    is_alone = str(requirement) == "geartrain"
    # geartrain-cli runs the plugins of the other distributions.
    names = packages.required(requirement) if is_alone else packages.required(requirement, CLI)
    installed = names & own
    there = Environment(folder / "venv", names, packages, None if is_alone else warm)
    declared = {name: list(packages[name].entry_points) for name in installed}
    expected = sorted(
        point.name for points in declared.values() for point in points if point.group in GROUPS
    )
    loaded = call(there.python, "load.py", *installed, cwd=folder).stdout
    found = json.loads(loaded.splitlines()[-1])
    assert found == expected, f"installed plugins are {found}, not {expected}"
    if is_alone:
        facts = ", ".join(alone(there, folder, packages))
        return f"{requirement}: {facts}, {time.monotonic() - begun:.0f} s"
    tried = own & extras(packages, requirement) or {canonicalize_name(requirement.name)}
    points = [point for name in sorted(tried) for point in declared[name]]
    of_kind = {
        kind: [point.name for point in points if GROUPS.get(point.group) == kind]
        for kind in GROUPS.values()
    }
    said = []
    selected = [name for name in of_kind["plugin"] if name not in ADDED]
    if "locked" in selected:
        call(there.geartrain, "plugins", "lock", cwd=folder)
    if selected:
        chosen = [word for name in selected for word in ("--plugin", name, *OPTIONS.get(name, ()))]
        said.append(fit(there, folder, ["--accelerator", "cpu", *chosen], "+".join(selected)))
    if not requirement.extras:  # those of an extra's distributions are tested without it
        starts = {point.value: point.name for point in points if point.name in of_kind["strategy"]}
        for name in sorted(starts.values()):  # without other names of the same strategy
            options = [*([] if name == "single" else ["--devices", "2"]), *OPTIONS.get(name, ())]
            said.append(
                fit(there, folder, ["--accelerator", "cpu", "--strategy", name, *options], name)
            )
        said += [
            fit(there, folder, ["--accelerator", name], name) for name in of_kind["accelerator"]
        ]
        for name in of_kind["plugin"]:
            if name in ADDED:
                options = ["--accelerator", "cpu", *ADDED[name][0]]
                said.append(fit(there, folder, options, name, added_target(folder, name)))
    for name in of_kind["command"]:
        done = call(there.geartrain, name, *COMMANDS[name], cwd=folder, may_fail=True)
        assert done.returncode in CODES.get(name, (0,)), (
            f"{name} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
        said.append(name)
    if requirement == CLI:
        missing = {
            point.name: other
            for other in sorted(own - installed)
            for point in packages[other].entry_points
            if point.group == "geartrain.commands"
        }
        said.append(missing_commands(there, folder, missing))
    if requirement.name == "geartrain-session":
        (folder / "loop.py").write_text(LOOP, encoding="utf-8")
        assert call(there.python, "loop.py", cwd=folder).stdout == "steps: 1\n"
        said.append("a loop")
    if requirement.name == "geartrain-parallel":
        (folder / "names.py").write_text("from geartrain.parallel import *", encoding="utf-8")
        call(there.python, "names.py", cwd=folder)
        said.append("its names")
    return f"{requirement}: {', '.join(said)}, {time.monotonic() - begun:.0f} s"


def extras(packages: Packages, requirement: Requirement):
    """Return the names of the distributions in the extras of a requirement."""
    declared = packages[canonicalize_name(requirement.name)].requires or ()
    lines = [Requirement(line) for line in declared]
    wanted = [
        line.name
        for line in lines
        if line.marker and any(line.marker.evaluate({"extra": one}) for one in requirement.extras)
    ]
    return {canonicalize_name(name) for name in wanted}


def alone(there: Environment, folder: Path, packages: Packages):
    """Train the digits example with core alone, and import each tool. Yield facts to print."""
    (folder / "tools.py").write_text(IMPORT, encoding="utf-8")
    errors = json.loads(call(there.python, "tools.py", *TOOLS, cwd=folder).stdout)
    for (tool, home), error in zip(TOOLS.items(), errors, strict=True):
        said = f"is not installed. Fix: pip install {home}"
        assert error.endswith(said), f"{tool}: {error}"
    for name in packages.required(DIGITS):
        with contextlib.suppress(FileExistsError):
            packages.link(name, there.purelib)
    call(there.python, "-c", ALONE, ROOT / "examples", cwd=folder)
    assert (folder / "digits" / "last.ckpt").exists()
    yield "digits"
    done = call(there.geartrain, "fit", "target.py", cwd=folder, may_fail=True)
    said = "geartrain: the command line is not installed. Fix: pip install geartrain-cli\n"
    assert (done.returncode, done.stderr) == (2, said), done.stderr
    yield f"{len(TOOLS) + 1} tools that are missing"


def missing_commands(there: Environment, folder: Path, missing: dict[str, str]):
    """Call commands of other distributions, and manual optimisation, without them installed.

    Return facts to print.

    Args:
        missing: a command -> its distribution.
    """
    for command, home in missing.items():
        done = call(there.geartrain, command, cwd=folder, may_fail=True)
        said = (
            f"geartrain {command}: geartrain {command} is not installed.\nFix: pip install {home}\n"
        )
        assert (done.returncode, done.stderr) == (2, said), f"{command}: {done.stderr}"
    done = call(
        there.geartrain,
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


def fit(there: Environment, folder: Path, chosen: list[str], label: str, target: str = "target.py"):
    """Train two steps. Return facts to print. If the machine cannot run it, check the error."""
    output = folder / f"run of {label[:99]}"  # a name has at most 255 bytes
    done = call(
        there.geartrain,
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
    wheels, installed = folder / "wheels", folder / "installed"
    sources = [ROOT / "core", *(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))]
    pip = (sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    call(*pip, "--target", installed, *build(wheels, sources))
    own = {canonicalize_name(found.metadata["Name"]) for found in distributions(path=[installed])}
    assert len(own) == len(sources), sorted(own)
    packages = Packages(installed, Path(distribution("torch").locate_file("")))
    wanted = [Requirement(name) for name in sys.argv[2:] or [*sorted(own), "geartrain[standard]"]]
    failed = False
    with tempfile.TemporaryDirectory() as short, ThreadPoolExecutor(2) as pool:
        warm = None
        if AVAILABLE:
            base = Environment(folder / "base", packages.required(CLI) - own, packages, None)
            warm = Warm(base.python, short, {**variables(), "PYTHONWARNINGS": "ignore"})
        for requirement, result in [
            (
                requirement,
                pool.submit(check, requirement, folder / str(number), own, packages, warm),
            )
            for number, requirement in enumerate(wanted)
        ]:
            try:
                print(result.result(), flush=True)
            except Exception as error:
                failed = True
                print(f"{requirement}: {error}", flush=True)
        if warm is not None:
            warm.end()
    sys.exit(failed)


if __name__ == "__main__":
    main()
