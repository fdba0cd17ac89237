"""Every code block of geartrain's three first documents runs. ``blocks.md`` has the blocks."""

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import geartrain as gt
from geartrain.commands import main
from geartrain_port import port
from geartrain_testing.launching import Launched, free_port, launched

from ..cuda.fake_pynvml import FakeGPU, FakeNVML
from . import completion

HERE = Path(__file__).parent
GUIDE = (HERE.parents[1] / "docs" / "from-lightning.md").read_text(encoding="utf-8")
#: Seconds for a block that trains.
DEADLINE = 100


@dataclass(frozen=True)
class Block:
    name: str
    kind: str
    #: Words of the expected result.
    expected: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def text(self):
        """The code to run."""
        return "\n".join(line[1:] for line in self.lines if line[:1] != "-") + "\n"

    @property
    def corrected(self):
        """True if a printed line cannot run."""
        return any(line.startswith("-") for line in self.lines)


def read():
    heading = r"^### (?P<name>\d{3}:\d+)\n\n(?P<kind>\w+): (?P<expected>[^\n]+)\n\n"
    pattern = heading + r"```diff\n(?P<lines>.*?)^```$"
    for found in re.finditer(
        pattern, (HERE / "blocks.md").read_text(encoding="utf-8"), re.M | re.S
    ):
        separator = "; " if found["kind"] == "plan" else " | "
        yield Block(
            found["name"],
            found["kind"],
            tuple(found["expected"].split(separator)),
            tuple(found["lines"].splitlines()),
        )


BLOCKS = list(read())


def of(*kinds):
    return [pytest.param(block, id=block.name) for block in BLOCKS if block.kind in kinds]


def test_every_block_is_read():
    headings = re.findall(r"^### (.+)$", (HERE / "blocks.md").read_text(encoding="utf-8"), re.M)
    assert headings == [block.name for block in BLOCKS]
    assert {line[:1] for block in BLOCKS for line in block.lines} == {"", " ", "+", "-"}


# --- planned -------------------------------------------------------------------------------------


class Net(gt.Module):
    def training_step(self, batch, batch_idx): ...
    def configure_optimizers(self): ...


@dataclass(frozen=True)
class Planned:
    plan: gt.Plan
    strategy: object
    #: The names that the block has defined.
    namespace: dict


@pytest.fixture
def plan(monkeypatch):
    """Return a function that runs a block and returns the plan of each Trainer and Fabric in it.

    Eight CUDA devices are assumed. A fake NVML reports that other programs use GPUs 0 and 3.
    """
    namespace, plans = {}, []

    def note(plan, made):
        (strategy,) = (part.plugin for part in made.hooks.parts if part.info.kind == "strategy")
        plans.append(Planned(plan, strategy, namespace))
        return made

    def trainer(**options):
        made = gt.Trainer(**options, assume={"cuda": 8})
        return note(made.check(Net, batch_size=7), made)

    def fabric(**options):
        made = gt.Session(**options, assume={"cuda": 8})
        return note(made.plan, made)

    def run(block):
        namespace.update(Trainer=trainer, torch=torch)
        code = re.sub(r"\bgt\.Trainer\(", "Trainer(", port(block.text).text)
        exec(compile(code, block.name, "exec"), namespace)
        return plans

    from geartrain_cuda import agree

    gpus = [
        FakeGPU(f"GPU-{letter * 8}-0000", processes=[(4242, 2**30)] if letter in "ad" else [])
        for letter in "abcdefgh"
    ]
    monkeypatch.setattr(gt, "Fabric", fabric, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(*gpus))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(agree, "_calls", 0)
    record = os.environ.pop(agree.RECORD, None)
    yield run
    os.environ.pop(agree.RECORD, None)
    if record is not None:
        os.environ[agree.RECORD] = record


def described(planned, expected):
    """Return the options of a plan that are not the default, in the words of ``expected``."""
    plan, strategy = planned.plan, planned.strategy
    # The choice of "auto" depends on a script to run again, which does not exist under pytest.
    name = (
        "auto"
        if plan.strategy.name in ("ddp", "ddp_spawn") and " auto" in expected
        else plan.strategy.name
    )
    facts = {
        "nodes": plan.num_nodes,
        "precision": plan.precision.name,
        "epochs": plan.options.max_epochs,
    }
    # A Fabric has no end.
    usual = {"nodes": (1,), "precision": ("32-true",), "epochs": (1000, -1)}
    words = [
        plan.accelerator.name,
        indices(plan.devices),
        name,
        *(f"{key}={facts[key]}" for key in facts if facts[key] not in usual[key]),
    ]
    if "global=" in expected:
        words.append(f"global={plan.as_dict()['batch_size']['global']}")
    if hasattr(strategy, "init_dist_connection"):
        words.append(f"backend={backend(planned)}")
    words += changed(strategy)
    if hasattr(strategy, "algorithm"):
        words += [f"algorithm={type(strategy.algorithm).__name__}", *changed(strategy.algorithm)]
    if "model" in planned.namespace:
        optimizer = planned.namespace["model"].configure_optimizers()
        words += [
            f"optimizer={type(optimizer).__name__}",
            f"lr={optimizer.defaults['lr']}",
            f"warmup_steps={optimizer.warmup_steps}",
        ]
    return " ".join(words)


def indices(devices):
    first, last = devices[0], devices[-1]
    return (
        f"{first}-{last}"
        if len(devices) > 2 and devices == tuple(range(first, last + 1))
        else ",".join(map(str, devices))
    )


def changed(thing):
    """Return attributes that differ from the defaults of the class, except ``same_on_all_ranks``.

    That attribute depends on the algorithm.
    """
    usual = vars(type(thing)())
    found = {
        name: value
        for name, value in vars(thing).items()
        if name[0] != "_" and isinstance(value, str | int | float)
    }
    return [
        f"{name}={value}"
        for name, value in found.items()
        if value != usual[name] and name != "same_on_all_ranks"
    ]


def backend(planned):
    """Return the backend with which the strategy creates its process group."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.distributed,
            "init_process_group",
            lambda backend, **options: asked.append(backend),
        )
        device = torch.device(planned.plan.accelerator.name)
        cluster = SimpleNamespace(rank=0, size=8)
        planned.strategy.init_dist_connection(
            SimpleNamespace(plan=planned.plan, device=device, cluster=cluster, store=None)
        )
    (found,) = asked
    return found


@pytest.mark.parametrize("block", of("plan"))
def test_block_is_planned(block, plan):
    plans = plan(block)
    assert [
        described(made, words) for made, words in zip(plans, block.expected, strict=True)
    ] == list(block.expected)


@pytest.mark.parametrize("block", of("error"))
def test_block_is_refused_with_a_fix(block, plan):
    with pytest.raises((gt.UsageError, ImportError), match=re.escape(block.expected[0])):
        plan(block)


@pytest.mark.parametrize("block", of("absent"))
def test_block_needs_a_package_that_is_not_installed(block):
    installed = {found.metadata["Name"] for found in distributions()}
    assert block.expected[0] not in installed, (
        f"{block.expected[0]} is installed: {block.name} can be run"
    )


# --- run -----------------------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """A working folder with the files that the blocks import."""
    for name in ("completion.py", "my_file.py"):
        shutil.copy(HERE / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", of("script", "ranks"))
def test_block_runs(block, in_folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(in_folder)
    monkeypatch.setitem(sys.modules, "completion", completion)
    if block.kind == "ranks":
        trainer = completion.trainer
        monkeypatch.setattr(
            completion, "trainer", lambda **given: trainer(**given | {"devices": 1})
        )
    exec(compile(port(block.text).text, block.name, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    for words in block.expected:
        assert words in printed


@pytest.mark.page
@pytest.mark.parametrize("block", of("ranks", "spawn"))
def test_block_runs_on_several_ranks(block, in_folder):
    (in_folder / "block.py").write_text(port(block.text).text, encoding="utf-8")
    with launched("block.py", folder=in_folder) as run:
        run.succeed(DEADLINE)
    for words in block.expected:
        assert words in run.out


@pytest.mark.parametrize(
    "block", [param for param in of("shell") if ".py --accelerator" in param.values[0].text]
)
def test_options_of_commands_are_planned(block, in_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # explain adds the target's folder
    monkeypatch.setitem(sys.modules, "completion", completion)
    monkeypatch.delitem(sys.modules, "my_file", raising=False)
    for options in re.findall(r"\w+\.py (--accelerator [^&\n]+)", block.text):
        assert main(["explain", "my_file.py", "--json", *shlex.split(options)]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["accelerator"]["name"] == "cpu"
        assert f"--strategy {plan['strategy']['name']}" in options.replace("'", "")


@pytest.mark.page
@pytest.mark.parametrize("block", of("shell"))
def test_commands_run(block, in_folder):
    text = block.text
    if text.startswith("python -m torch.distributed.run\n"):  # one command on several lines
        text = " ".join(text.split())
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(in_folder),
        "PORT": str(free_port()),
        "HERE": str(in_folder),
    }
    run = Launched(["bash", "-e", "-c", text], in_folder, environment)
    try:
        run.succeed(DEADLINE)
    finally:
        run.kill()
    printed = run.out + "".join(path.read_text() for path in in_folder.glob("rank-*"))
    for words in block.expected:
        assert words in printed
    ranks = [words for words in block.expected if words.startswith("rank")]
    written = [json.loads(path.read_text().splitlines()[1]) for path in in_folder.glob("rank-*")]
    assert len(written) == len(ranks)
    for weights in written:
        assert weights == pytest.approx(weights_of_one_process(len(ranks)), abs=1e-6)


def weights_of_one_process(ranks):
    """Return the weights after training on the joined batches of all ranks."""
    model = completion.Classifier()
    before = model.layer.weight.clone()
    completion.trainer(max_epochs=1).fit(model, completion.data(batch_size=8 * ranks))
    assert not torch.allclose(model.layer.weight, before, atol=1e-3)
    return model.layer.weight.flatten().tolist()


# --- the guide -----------------------------------------------------------------------------------


def corrections():
    section = GUIDE.partition("## Corrections to the printed documentation\n")[2].partition(
        "\n## "
    )[0]
    return re.findall(r"^\| (\d{3}:\d+) \|", section, re.M)


def test_the_guide_lists_every_block_that_cannot_run_as_printed():
    assert corrections() == [block.name for block in BLOCKS if block.corrected]
