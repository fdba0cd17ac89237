"""Every code block of the three documents that geartrain began with runs with geartrain; ``blocks.md`` has them and says how."""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

import geartrain as gt
from geartrain.porting import port
from geartrain.testing.launching import Launched, free_port, launched

from ..cuda.fake_pynvml import FakeGPU, FakeNVML

HERE = Path(__file__).parent
GUIDE = (HERE.parents[1] / "docs" / "from-lightning.md").read_text(encoding="utf-8")
#: Seconds for a block that trains.
DEADLINE = 100


@dataclass(frozen=True)
class Block:
    name: str
    kind: str
    #: What must come of it.
    expected: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def text(self):
        """What is run."""
        return "\n".join(line[1:] for line in self.lines if line[:1] != "-") + "\n"

    @property
    def corrected(self):
        """Whether something that is printed cannot run."""
        return any(line.startswith("-") for line in self.lines)


def read():
    pattern = r"^### (?P<name>\d{3}:\d+)\n\n(?P<kind>\w+): (?P<expected>[^\n]+)\n\n```diff\n(?P<lines>.*?)^```$"
    for found in re.finditer(pattern, (HERE / "blocks.md").read_text(encoding="utf-8"), re.M | re.S):
        separator = "; " if found["kind"] == "plan" else " | "
        yield Block(found["name"], found["kind"], tuple(found["expected"].split(separator)), tuple(found["lines"].splitlines()))


BLOCKS = list(read())


def of(*kinds):
    return [pytest.param(block, id=block.name) for block in BLOCKS if block.kind in kinds]


def test_every_block_is_read():
    headings = re.findall(r"^### (.+)$", (HERE / "blocks.md").read_text(encoding="utf-8"), re.M)
    assert headings == [block.name for block in BLOCKS]
    assert {line[:1] for block in BLOCKS for line in block.lines} == {"", " ", "+", "-"}


# --- planned -------------------------------------------------------------------------------------------------------------


class Net(gt.Module):
    def training_step(self, batch, batch_idx): ...
    def configure_optimizers(self): ...


@pytest.fixture
def plan(monkeypatch):
    """Run a block; the plan of each Trainer and Fabric in it, on eight CUDA devices that are assumed. NVML is that of such a machine."""
    plans = []

    def trainer(**options):
        made = gt.Trainer(**options, assume={"cuda": 8})
        plans.append(made.check(Net, batch_size=7))
        return made

    def fabric(**options):
        made = gt.Session(**options, assume={"cuda": 8})
        plans.append(made.plan)
        return made

    def run(block):
        namespace = {"Trainer": trainer, "torch": torch}
        code = re.sub(r"\bgt\.Trainer\(", "Trainer(", port(block.text).text)
        exec(compile(code, block.name, "exec"), namespace)
        return plans

    from geartrain_cuda import agree

    monkeypatch.setattr(gt, "Fabric", fabric, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(*(FakeGPU(f"GPU-{letter * 8}-0000") for letter in "abcdefgh")))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(agree, "_calls", 0)
    record = os.environ.pop(agree.RECORD, None)
    yield run
    os.environ.pop(agree.RECORD, None)
    if record is not None:
        os.environ[agree.RECORD] = record


def described(plan, expected):
    """A plan in the words of ``expected``, as far as that goes."""
    # What "auto" takes depends on whether there is a script to run again; under pytest there is none.
    strategy = "auto" if plan.strategy.name in ("ddp", "ddp_spawn") and " auto" in expected else plan.strategy.name
    words = [plan.accelerator.name, str(len(plan.devices)), strategy]
    more = {
        "nodes": plan.num_nodes,
        "precision": plan.precision.name,
        "epochs": plan.options.max_epochs,
        "global": plan.as_dict()["batch_size"]["global"],
    }
    words += [f"{name}={more[name]}" for name in (word.partition("=")[0] for word in expected.split()[3:])]
    return " ".join(words)


@pytest.mark.parametrize("block", of("plan"))
def test_block_is_planned(block, plan):
    plans = plan(block)
    assert [described(made, words) for made, words in zip(plans, block.expected, strict=True)] == list(block.expected)


@pytest.mark.parametrize("block", of("error"))
def test_block_is_refused_with_what_to_install(block, plan):
    with pytest.raises((gt.UsageError, ImportError), match=re.escape(block.expected[0])):
        plan(block)


@pytest.mark.parametrize("block", of("absent"))
def test_block_needs_a_package_that_is_not_here(block):
    installed = {found.metadata["Name"] for found in distributions()}
    assert block.expected[0] not in installed, f"{block.expected[0]} is installed: {block.name} can be run"


# --- run -----------------------------------------------------------------------------------------------------------------


def place(folder):
    for name in ("completion.py", "my_file.py"):
        shutil.copy(HERE / name, folder / name)


@pytest.mark.parametrize("block", of("script"))
def test_block_runs(block, tmp_path):
    place(tmp_path)
    (tmp_path / "block.py").write_text(port(block.text).text, encoding="utf-8")
    with launched("block.py", folder=tmp_path) as run:
        run.succeed(DEADLINE)
    for words in block.expected:
        assert words in run.out


@pytest.mark.parametrize("block", of("shell"))
def test_commands_run(block, tmp_path):
    place(tmp_path)
    text = block.text
    if text.startswith("python -m torch.distributed.run\n"):  # one command on several lines
        text = " ".join(text.split())
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(tmp_path),
        "PORT": str(free_port()),
        "HERE": str(tmp_path),
    }
    run = Launched(["bash", "-e", "-c", text], tmp_path, environment)
    try:
        run.succeed(DEADLINE)
    finally:
        run.kill()
    printed = run.out + "".join(path.read_text() for path in tmp_path.glob("rank-*"))
    for words in block.expected:
        assert words in printed
    assert len(list(tmp_path.glob("rank-*"))) == sum(words.startswith("rank") for words in block.expected)


# --- the guide -----------------------------------------------------------------------------------------------------------


def corrections():
    section = GUIDE.partition("## Corrections to the printed documentation\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (\d{3}:\d+) \|", section, re.M)


def test_the_guide_lists_every_block_that_cannot_run_as_printed():
    assert corrections() == [block.name for block in BLOCKS if block.corrected]
