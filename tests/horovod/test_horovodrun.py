"""The commands for Horovod and MPI in geartrain's first documents run as printed."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from geartrain_horovod.installed import facts, missing
from geartrain_testing.launching import Launched

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(300)]
SCRIPTS = Path(sysconfig.get_path("scripts"))
SEEDS = Path(__file__).parents[1] / "seeds"
#: A block of seeds/blocks.md, here of document 001, lines 364 and 369.
BLOCK = r"^### 001:{line}\n\n(?P<kind>\w+): (?P<expected>[^\n]+)\n\n```diff\n(?P<lines>.*?)^```$"


def block(line):
    """Return a block's kind, expected words and text."""
    found = re.search(
        BLOCK.format(line=line), (SEEDS / "blocks.md").read_text(encoding="utf-8"), re.M | re.S
    )
    text = "\n".join(each[1:] for each in found["lines"].splitlines() if each[:1] != "-")
    return found["kind"], found["expected"].split(" | "), text


@pytest.fixture
def folder(tmp_path):
    """A folder with train.py: the printed Trainer on the CPU, and the code that the page omits."""
    shutil.copy(SEEDS / "completion.py", tmp_path)
    kind, _, text = block(364)
    assert kind == "plan"
    (tmp_path / "train.py").write_text(
        f"""
from completion import Classifier, data
from functools import partial
import geartrain

Trainer = partial(geartrain.Trainer, accelerator="cpu", max_epochs=1, enable_progress_bar=False)
{text}
module = Classifier()
trainer.fit(module, data())
world = trainer.run.world
local = f"node {{world.node_rank}}, local rank {{world.local_rank}} of {{world.local_size}}"
print(f"{{local}}, rank {{world.rank}} of {{world.size}}", flush=True)
print(f"weights {{module.layer.weight.sum().item()}}", flush=True)
"""
    )
    return tmp_path


def run(folder, command, **environment):
    """Run a command, check that it succeeds and leaves no process, and return its output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), str(SCRIPTS), os.environ["PATH"]])
    program = Launched(["bash", "-e", "-c", command], folder, {"PATH": path, **environment})
    try:
        program.succeed(200)
        assert program.left_behind() == []
    finally:
        program.kill()
    return program.out


def check(printed, ranks):
    for rank in range(ranks):
        # mpirun may write its own words before the end of a line.
        assert re.search(rf", rank {rank} of {ranks}\b", printed)
    weights = re.findall(r"weights ([-+.e\d]+)", printed)
    assert len(weights) == ranks
    assert len(set(weights)) == 1, "ranks have different weights"


def test_printed_commands(folder):
    kind, expected, text = block(369)
    assert kind == "horovodrun"
    on_one, on_two = [line for line in text.splitlines() if line.startswith("horovodrun")]
    printed = run(folder, on_one.replace("horovodrun ", "horovodrun --network-interfaces lo "))
    check(printed, 4)
    for words in expected:
        assert words in printed
    # Two names of this machine stand for two machines: to Horovod each is a node. To Open MPI,
    # which horovodrun uses if Horovod was built with it, they are one node, hence --gloo.
    assert "-np 8 -H hostname1:4,hostname2:4" in on_two
    on_two = on_two.replace(
        "-np 8 -H hostname1:4,hostname2:4",
        "--gloo --network-interfaces lo -np 4 -H localhost:2,127.0.0.1:2",
    )
    printed = run(folder, on_two)
    check(printed, 4)
    for node in range(2):
        for local in range(2):
            assert f"node {node}, local rank {local} of 2, rank {2 * node + local} of 4" in printed


@pytest.mark.mpi
@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin)"
)
@pytest.mark.skipif(
    missing() is not None or not facts()["mpi"],
    reason="Horovod was built without MPI (geartrain_horovod.install --mpi)",
)
@pytest.mark.parametrize(
    "command", ["mpirun --allow-run-as-root --oversubscribe -np 2", "horovodrun -np 2 --mpi"]
)
def test_mpi(folder, command):
    more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    check(run(folder, f"{command} {sys.executable} train.py", **more), 2)


def test_mpirun_with_a_horovod_without_mpi_uses_geartrains_rendezvous(folder):
    """Open MPI's variables give the ranks, and Gloo connects them."""
    if facts()["mpi"]:
        pytest.skip("this Horovod was built with MPI")
    common = {
        "PATH": os.environ["PATH"],
        "OMPI_MCA_ess_base_jobid": "17",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=folder,
            env={
                **common,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        check("".join(each.communicate(timeout=200)[0] for each in ranks), 2)
    finally:
        for each in ranks:
            each.kill()
