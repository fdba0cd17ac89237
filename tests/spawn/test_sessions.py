"""``fit`` with ddp_spawn in notebooks, interactive sessions, unguarded scripts and commands."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from several_ranks import command, results

from geartrain_testing.launching import HAS_PROC, LOOPBACK, launched, listening, until

from .models import Net, loader, trainer

STARTED = 60
#: Most seconds from a fault to the end of all processes.
PROMPT = 30

#: Ones has the metaclass of abc, a frozen module: a rank must not get a copy of it.
NET = """
import collections.abc, os, threading
from pathlib import Path
import torch
import geartrain as gt

class Ones(torch.utils.data.Dataset, collections.abc.Sized):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return (torch.ones(4),)

class Net(gt.Module):
    def __init__(self, wait: bool = False):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.wait = wait

    def training_step(self, batch, batch_idx):
        Path(f"step-{self.global_rank}").write_text(str(os.getpid()))
        if self.wait and batch_idx == 1:
            Path(f"waits-{self.global_rank}").touch()
            threading.Event().wait()
        loss = (self.net(batch[0]) - 1).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self):
        workers = int(os.environ.get("LOADER_WORKERS", "0"))
        return torch.utils.data.DataLoader(Ones(), batch_size=4, num_workers=workers)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def teardown(self, stage):
        Path(f"teardown-{self.global_rank}").touch()
"""
FIT = """
trainer = gt.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp_spawn",
    strategy_options=OPTIONS,
    max_epochs=4,
    enable_progress_bar=False,
)
module = Net()
before = module.net.weight.detach().clone()
trainer.fit(module)
trainer.fit(module)
moved = bool((module.net.weight != before).all())
print("steps", trainer.global_step, "moved", moved, "loss", trainer.run.metrics["loss"] < 0.1)
"""
EXPECTED = "steps 8 moved True loss True"


def fit(start_method="forkserver"):
    return f"OPTIONS = dict(start_method={start_method!r})\n" + FIT


def methods(first, *others):
    """Parametrize: the first start method runs by default, the others in the matrix."""
    return pytest.mark.parametrize(
        "method", [first, *(pytest.param(method, marks=pytest.mark.matrix) for method in others)]
    )


# --- sessions -------------------------------------------------------------------------------------


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """A function that runs cells in a new notebook kernel and returns them with their outputs."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    kernels = tmp_path / "jupyter" / "kernels" / "here"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "here", "language": "python"})
    )

    def execute(*cells):
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells]
        )
        nbclient.NotebookClient(
            notebook,
            timeout=100,
            kernel_name="here",
            resources={"metadata": {"path": str(tmp_path)}},
        ).execute()
        return notebook.cells

    return execute


#: A fit of a second or more in the notebook's process, with a counter of display updates.
BAR = """
import time
import IPython.display
updates, update = [], IPython.display.DisplayHandle.update

def counted(self, *args, **options):
    updates.append(args)
    update(self, *args, **options)

IPython.display.DisplayHandle.update = counted

class Slow(Net):
    def training_step(self, batch, batch_idx):
        time.sleep(0.15)
        if batch_idx == 2:
            print("printed")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - 1).square().mean(), prog_bar=True)

    val_dataloader = Net.train_dataloader

gt.Trainer(accelerator="cpu", devices=1, max_epochs=2).fit(Slow())
"""


@pytest.mark.end_to_end
@methods("forkserver", "fork")
def test_in_a_notebook(tmp_path, method, executed):
    checks = (
        "trainer.validate",
        "assert trainer.run.optimizers",
        "import multiprocessing; multiprocessing.active_children()",
    )
    cells = executed(NET, fit(method), *checks, BAR, "len(updates)")
    text = "".join(output.get("text", "") for output in cells[1].outputs)
    assert EXPECTED in text
    assert cells[4].outputs[0]["data"]["text/plain"] == "[]"
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-0", "step-1"}
    if method == "forkserver":
        check_progress(*cells[5:])


def check_progress(drawn, counted):
    """Progress is one output of the notebook's process."""
    displays = [
        output["data"]["text/plain"]
        for output in drawn.outputs
        if output["output_type"] == "display_data"
    ]
    bars = [shown for shown in displays if shown.startswith("epoch 2")]
    assert len(bars) == 1
    assert bars[0].startswith("epoch 2/2 \u2501")  # the last update
    assert "4/4" in bars[0]
    assert "val_loss=" in bars[0]
    assert "\n" not in bars[0]  # the validation's bar is removed
    assert int(counted.outputs[0]["data"]["text/plain"]) > 1  # the number depends on the speed
    printed = "".join(
        output["text"] for output in drawn.outputs if output["output_type"] == "stream"
    )
    header, *lines, end = printed.splitlines()
    assert (header, lines) == ("Slow (5 parameters) on cpu", ["printed", "printed"])
    assert end == 'nothing was saved: output="DIR"'
    assert any("val_loss" in shown and "metric" in shown for shown in displays)  # the closing table


@pytest.mark.end_to_end
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_in_an_interactive_session(tmp_path, method):
    session = f"{NET}\n\n{fit(method)}"
    (tmp_path / "session.py").write_text(session)
    # Typed in, as a user does: with -i FILE there would be a script that could run again.
    typed = "exec(compile(open('session.py').read(), '<typed>', 'exec'), globals())\n"
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        cwd=tmp_path,
        input=typed,
        capture_output=True,
        text=True,
        timeout=100,
        env=_environment(tmp_path),
    )
    assert EXPECTED in done.stdout, done.stderr


@methods("forkserver", "spawn", "fork")
def test_a_script_without_a_guard(tmp_path, method):
    (tmp_path / "train.py").write_text(f"print('the script runs')\n{NET}\n{fit(method)}")
    with launched("train.py", folder=tmp_path) as run:
        run.succeed()
        assert run.out.count("the script runs") == 1
        assert EXPECTED in run.out
        assert not run.left_behind()


def test_from_a_thread():
    one, module = trainer(), Net()
    thread = threading.Thread(target=lambda: one.fit(module, loader()))
    thread.start()
    thread.join()
    assert one.global_step == len(module.losses) == 12


COMMAND = (
    "net.py",
    "--strategy",
    "ddp_spawn",
    "--devices",
    "2",
    "--accelerator",
    "cpu",
    "--max-epochs",
    "2",
)


def test_the_command_line(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    done = command(tmp_path, "fit", *COMMAND, "--strategy.start_method", "fork")
    assert done.end == "0", done.printed
    assert "loss" in done.out
    assert {path.name for path in tmp_path.glob("teardown-*")} == {"teardown-0", "teardown-1"}


def test_spawn_is_another_name(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    done = command(
        tmp_path,
        "explain",
        "net.py",
        "--strategy",
        "spawn",
        "--devices",
        "2",
        "--accelerator",
        "cpu",
        "--json",
    )
    plan = json.loads(done.out)
    assert plan["processes"] == 2
    assert plan["strategy"]["distribution"] == "geartrain-spawn"


class Place(Net):
    """Records its place in the last step."""

    def training_step(self, batch, batch_idx):
        self.where = (self.global_rank, self.trainer.run.world.node_rank, self.trainer.world_size)
        return super().training_step(batch, batch_idx)


def be_a_node():
    """Train twice as one node of two, with one rank each."""
    one, module = trainer(devices=1, num_nodes=2), Place()
    for _ in range(2):
        one.fit(module, loader())
    return module.where, len(module.losses), dict(module.state_dict())


def test_two_nodes(tmp_path):
    (first, steps, mine), (second, also, theirs) = results(tmp_path, be_a_node, place="node")
    assert (first, second) == ((0, 0, 2), (1, 1, 2))
    assert steps == also == 2 * 12
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


# --- the starter ends -----------------------------------------------------------------------------


def waiting(tmp_path, method="forkserver", **environment):
    (tmp_path / "train.py").write_text(NET + fit(method).replace("Net()", "Net(wait=True)"))
    return launched("train.py", folder=tmp_path, **environment)


def until_waiting(run, tmp_path):
    marks = (tmp_path / "waits-0", tmp_path / "waits-1")
    until(
        lambda: all(path.exists() for path in marks) or run.process.poll() is not None,
        STARTED,
        "both ranks are in their second step",
    )
    assert run.process.poll() is None, run.err


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_starter_ends_everything_and_tears_down(tmp_path, number):
    with waiting(tmp_path) as run:
        until_waiting(run, tmp_path)
        run.process.send_signal(number)
        assert run.wait(PROMPT) != 0
        assert number.name in run.err
        until(lambda: not run.processes(), PROMPT, "no process is left")
    assert {path.name for path in tmp_path.glob("teardown-*")} == {"teardown-0", "teardown-1"}


@pytest.mark.skipif(not HAS_PROC, reason="finds processes through /proc")
@methods("fork", "forkserver")
def test_ctrl_c_in_a_terminal_ends_everything_and_tears_down(tmp_path, method):
    """A terminal signals all processes, so a rank gets a second request to end in its teardown."""
    with waiting(tmp_path, method) as run:
        until_waiting(run, tmp_path)
        found = listening(run.processes())
        assert found
        assert [address for address in found if address not in LOOPBACK] == []
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(PROMPT) != 0
        assert "SIGINT" in run.err
        until(lambda: not run.processes(), PROMPT, "no process is left")
    assert {path.name for path in tmp_path.glob("teardown-*")} == {"teardown-0", "teardown-1"}


@pytest.mark.end_to_end
@pytest.mark.skipif(not HAS_PROC, reason="finds processes through /proc")
@methods("fork", "forkserver")
def test_all_processes_end_after_the_starter_is_killed(tmp_path, method):
    with waiting(tmp_path, method, LOADER_WORKERS="1") as run:
        until_waiting(run, tmp_path)
        assert len(run.processes()) >= 3
        run.process.kill()
        until(lambda: not run.processes(), PROMPT, "no process is left")


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**kept, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}


@pytest.mark.end_to_end
def test_the_forkserver_exits_without_undoing_its_imports(tmp_path):
    """Otherwise it may outlive the program by seconds, if torch has many libraries."""
    text = "import atexit; atexit.register(print, 'undone'); import geartrain_spawn.preload"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=STARTED, check=True
    )
    assert done.stdout == ""
