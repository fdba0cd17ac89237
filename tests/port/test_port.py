"""``geartrain port``: ported scripts run, and lines that cannot be ported are named."""

import io
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from geartrain_port import port

LIGHTNING = Path(__file__).parent / "lightning"
SCRIPTS = {
    "classic": ["learns True", "epochs 3"],
    "modern": ["stopped True", "columns True"],
    "names": ["loss True", "base True"],
}


def text(name):
    return (LIGHTNING / f"{name}.py").read_text(encoding="utf-8")


def _cases(text):
    """Return the cases in a text, source -> result: a blank line between cases, ``->`` inside."""
    return dict(case.split("\n->\n") for case in text.strip().split("\n\n"))


def comments(source):
    return sorted(
        t.string
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    )


# --- whole scripts --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_ported_script_runs(name, folder, command, capsys):
    (folder / "script.py").write_text(text(name), encoding="utf-8")
    done = command("port script.py --write")
    assert (done.code, done.out) == (0, "")
    assert all(": changed: " in line for line in done.err.splitlines())
    assert "lightning" not in (folder / "script.py").read_text().partition('"""\n')[2].partition(
        "class "
    )[0].lower().replace("as lightningmodule", "")
    exec(compile((folder / "script.py").read_text(), "script.py", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    for line in SCRIPTS[name]:
        assert line in printed


@pytest.mark.parametrize("name", [*SCRIPTS, "unportable"])
def test_a_ported_script_stays_as_it_is(name):
    once = port(text(name))
    again = port(once.text)
    assert again.text == once.text
    # The second run finds the rest again, unless its names are geartrain's by now.
    assert {left.instead for left in again.left} <= {left.instead for left in once.left}


@pytest.mark.parametrize("name", [*SCRIPTS, "unportable"])
def test_every_comment_stays(name):
    assert comments(port(text(name)).text) == comments(text(name))


def test_lines_that_cannot_be_ported_are_named(folder, command):
    (folder / "script.py").write_text(text("unportable"), encoding="utf-8")
    done = command("port script.py --write")
    assert done.code == 1
    lines = text("unportable").splitlines()
    named, todo = {}, [line for line in done.err.splitlines() if ": changed: " not in line]
    for line in todo[:-1]:
        place, _, what = line.partition(": ")
        named.setdefault(lines[int(place.split(":")[1]) - 1].strip(), []).append(what)
    wanted = {
        "from pytorch_lightning.callbacks import LearningRateFinder, Timer": ["geartrain tune lr"],
        "from pytorch_lightning.utilities import rank_zero_only": ["trainer.is_global_zero"],
        "parser = Trainer.add_argparse_args(None)": ["gt.cli"],
        "def training_step(self, batch, batch_idx, optimizer_idx):": ["manual optimisation"],
        'self.log("loss", batch.sum(), enable_graph=True)': ["enable_graph"],
        "def optimizer_zero_grad(self, epoch, batch_idx, optimizer, optimizer_idx):": [
            "without optimizer_idx"
        ],
        "def transfer_batch_to_device(self, batch, device, dataloader_idx):": [
            "the same method of the module"
        ],
        "def on_epoch_end(self, trainer, pl_module):": ["on_train_epoch_end"],
        "print(pl_module.trainer.fit_loop.epoch_loop.batch_idx)": ["trainer.current_epoch"],
        "trainer = Trainer(": [
            *("gpus=args.gpus", "tpu_cores", "deepspeed", "16-true", "barebones"),
            *("logger=True", "truncated_bptt_steps", "ckpt_path=PATH", "invented", "**"),
        ],
        "trainer.tune(net)": ["geartrain tune"],
        "pl.utilities.model_summary.summarize(net)": ["docs/from-lightning.md"],
    }
    assert set(named) == set(wanted)
    for line, words in wanted.items():
        for word in words:
            assert any(word in what for what in named[line]), (line, word, named[line])
    assert todo[-1].startswith(f"geartrain port: {len(todo) - 1} things are left")
    after = (folder / "script.py").read_text()
    for kept in (
        "import pytorch_lightning as pl\n",
        "rank_zero_only\n",
        "pl.utilities.model_summary",
        "tpu_cores=8",
        "import Timer\n",
    ):
        assert kept in after
    assert "class Net(gt.Module)" in after
    assert "devices=args.gpus" in after


# --- single lines ---------------------------------------------------------------------------------

TRAINERS = [
    ("gpus=2", 'devices=2, accelerator="gpu"'),
    ("gpus=2, accelerator='cuda'", "devices=2, accelerator='cuda'"),
    ("gpus=[0, 1]", 'devices=[0, 1], accelerator="gpu"'),
    ("gpus=None, max_epochs=1", 'accelerator="cpu", max_epochs=1'),
    ("gpus=2, accelerator='ddp'", "devices=2, accelerator=\"gpu\", strategy='ddp'"),
    ("gpus=2, distributed_backend='dp'", "devices=2, accelerator=\"gpu\", strategy='dp'"),
    (
        "num_processes=2, accelerator='ddp_cpu'",
        'devices=2, strategy="ddp_spawn", accelerator="cpu"',
    ),
    ("num_processes=2", 'devices=2, accelerator="cpu"'),
    (
        "strategy='ddp_find_unused_parameters_true'",
        'strategy="ddp", strategy_options={"find_unused_parameters": True}',
    ),
    ("strategy='deepspeed_stage_3'", 'strategy="deepspeed", strategy_options={"stage": 3}'),
    ("strategy='ddp_notebook'", 'strategy="ddp_spawn", strategy_options={"start_method": "fork"}'),
    (
        "accelerator='gpu', devices=2, auto_select_gpus=True",
        'accelerator="cuda", devices=2, accelerator_options={"auto_select": True}',
    ),
    ("auto_select_gpus=False, tpu_cores=None, max_epochs=1", "max_epochs=1"),
    ("replace_sampler_ddp=False", "use_distributed_sampler=False"),
    ("default_root_dir='runs'", "output='runs'"),
    ("progress_bar_refresh_rate=20", ""),
    ("progress_bar_refresh_rate=0", "enable_progress_bar=False"),
    ("weights_summary='top', track_grad_norm=2", 'plugins=["model_summary", "norms"]'),
    ("enable_model_summary=False, enable_checkpointing=False, logger=False", ""),
    (
        "accelerator='gpu', benchmark=True",
        'accelerator="cuda", accelerator_options={"cudnn_benchmark": True}',
    ),
    ("log_gpu_memory='all', logger=a", 'plugins=[a, "device_stats"]'),
    ("logger=[a, b]", "plugins=[a, b]"),
    ("checkpoint_callback=c, callbacks=[]", "callbacks=[c]"),
    ("checkpoint_callback=c, callbacks=d", "callbacks=[*d, c]"),
    ("gradient_clip_val=0, max_steps=None, deterministic=None", ""),
    ("max_epochs=1, **more", None),
]


@pytest.mark.parametrize(("before", "after"), [case for case in TRAINERS if case[1] is not None])
def test_arguments_of_the_trainer(before, after):
    done = port(f"import lightning as L\nt = L.Trainer({before})\n")
    assert done.text == f"import geartrain as gt\nt = gt.Trainer({after})\n"
    assert not done.left


def test_arguments_of_the_trainer_are_geartrains(installed):
    """geartrain's Trainer accepts all of them; only hardware or packages may be missing."""
    import geartrain as gt

    names = {"a": "csv", "b": "csv", "c": gt.callbacks.Timer(1), "d": []}
    for _, after in TRAINERS:
        # tests/seeds tests those that need a GPU, with an assumed one.
        if after is None or "accelerator" in after:
            continue
        refused = ""
        try:
            eval(f"gt.Trainer({after})", {"gt": gt, **names})
        except gt.UsageError as error:
            refused = str(error)
        assert "has no argument" not in refused


OTHERS = {
    # Imports.
    **_cases("""
import pytorch_lightning
pytorch_lightning.Trainer()
->
import geartrain
geartrain.Trainer()

import lightning.pytorch as pl
pl.Trainer()
->
import geartrain as gt
gt.Trainer()

from lightning.pytorch.utilities.combined_loader import CombinedLoader
->
from geartrain import CombinedLoader

from lightning.pytorch.utilities import grad_norm
->
from geartrain.callbacks import grad_norm

from pytorch_lightning.trainer.supporters import CombinedLoader
->
from geartrain import CombinedLoader

from lightning import pytorch as pl
pl.Trainer()
->
import geartrain as gt
gt.Trainer()

import pytorch_lightning as pl
gt = pl.Trainer()
->
import geartrain
gt = geartrain.Trainer()

import pytorch_lightning.callbacks as cb
cb.Timer(1)
->
import geartrain.callbacks as cb
cb.Timer(1)

from pytorch_lightning import callbacks
callbacks.Timer(1)
->
from geartrain import callbacks
callbacks.Timer(1)

from lightning.fabric import Fabric
Fabric()
->
from geartrain import Fabric
Fabric()

from lightning.fabric.accelerators import find_usable_cuda_devices as f
f(2)
->
from geartrain.accelerators import find_usable_cuda_devices as f
f(2)

from pytorch_lightning.strategies.ddp import DDPStrategy
DDPStrategy()
->
from geartrain.strategies import DDPStrategy
DDPStrategy()

from pytorch_lightning import LightningModule
class A(LightningModule): ...
->
from geartrain import Module
class A(Module): ...

from lightning import LightningModule
class A(LightningModule): ...
__all__ = ['LightningModule']
->
from geartrain import Module as LightningModule
class A(LightningModule): ...
__all__ = ['LightningModule']

from lightning import LightningModule; import os
class A(LightningModule): ...
->
from geartrain import Module
import os
class A(Module): ...

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl
pl.Trainer()
->
try:
    import geartrain as gt
except ImportError:
    import geartrain as gt
gt.Trainer()

import lightning as L
def f(x: 'list[L.LightningModule]') -> 'L.Trainer | None': ...
->
import geartrain as gt
def f(x: 'list[gt.Module]') -> 'gt.Trainer | None': ...

def f():
    import pytorch_lightning as pl
    return pl.Trainer()
->
def f():
    import geartrain as gt
    return gt.Trainer()

import pytorch_lightning as pl
pl.callbacks.DeviceStatsMonitor(True)
->
import geartrain as gt
gt.callbacks.DeviceStatsMonitor(cpu_stats=True)
"""),
    # Calls.
    **_cases("""
from pytorch_lightning.loggers import TensorBoardLogger as T
T('tb', name='x', version=3, log_graph=True)
->
from geartrain.loggers import TensorBoard as T
T(folder="tb/x/version_3", graph=True)

from pytorch_lightning.loggers import TensorBoardLogger
TensorBoardLogger(root)
->
from geartrain.loggers import TensorBoard
TensorBoard(folder=root)

from pytorch_lightning.loggers import WandbLogger
WandbLogger('run', project='p', log_model='all', offline=off)
->
from geartrain.loggers import WandB
WandB(name='run', project='p', checkpoints=True, mode="offline" if off else None)

from pytorch_lightning.loggers import MLFlowLogger
MLFlowLogger(experiment_name='e', tracking_uri=u)
->
from geartrain.loggers import MLflow
MLflow(experiment='e', tracking_uri=u)

from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
EMAWeightAveraging('cpu', decay=0.9, update_every_n_steps=2)
->
from geartrain.callbacks import EMAWeightAveraging, WeightAveraging
EMAWeightAveraging('cpu', decay=0.9, update_every_n_steps=2)

from lightning.pytorch.callbacks import ThroughputMonitor
ThroughputMonitor(len, world_size=2, window_size=5)
->
from geartrain.callbacks import ThroughputMonitor
ThroughputMonitor(len, window_size=5)

import lightning as L
t = L.Trainer(callbacks=[ModelCheckpoint()])
t.test(ckpt_path='best')
->
import geartrain as gt
t = gt.Trainer(callbacks=[ModelCheckpoint()])
t.test(ckpt_path='best')

from lightning.pytorch.callbacks import ModelCheckpoint
ModelCheckpoint('ckpt', 'x', monitor='a', enable_version_counter=True)
->
from geartrain.callbacks import ModelCheckpoint
ModelCheckpoint(dirpath='ckpt', filename='x', monitor='a')

from pytorch_lightning.callbacks import EarlyStopping
EarlyStopping('a', 0.1, 3, True, 'max')
->
from geartrain.callbacks import EarlyStopping
EarlyStopping('a', min_delta=0.1, patience=3, verbose=True, mode='max')

import lightning as L
t = L.Trainer()
t.test(net, test_dataloaders=d, verbose=False)
->
import geartrain as gt
t = gt.Trainer()
t.test(net, dataloaders=d)

from lightning import LightningModule
class Net(LightningModule): ...
Net.load_from_checkpoint(path, map_location='cpu', strict=False, hidden=3)
->
from geartrain import Module
class Net(Module): ...
Net.load_from_checkpoint(path, map_location='cpu', strict=False, hidden=3)

import lightning as L
class Store: ...
class Net(L.LightningModule): ...
Store.load_from_checkpoint("a", "folder", map_location="cpu", weights_only=True)
Net.load_from_checkpoint("a", "cpu", weights_only=True)
->
import geartrain as gt
class Store: ...
class Net(gt.Module): ...
Store.load_from_checkpoint("a", "folder", map_location="cpu", weights_only=True)
Net.load_from_checkpoint("a", map_location="cpu")

import lightning as L
t = L.Trainer()
t.fit(net, d, ckpt_path='a.ckpt')
->
import geartrain as gt
t = gt.Trainer()
t.fit(net, d, ckpt_path='a.ckpt')

import lightning as L
t = L.Trainer()
t.fit(net, d, ckpt_path='last')
->
import geartrain as gt
t = gt.Trainer()
t.fit(net, d, ckpt_path="auto")
"""),
    # Fabric.
    **_cases("""
import lightning as L
f = L.Fabric(loggers=[a, b], devices=2)
f.log('loss', 1)
->
import geartrain as gt
f = gt.Fabric(plugins=[a, b], devices=2)
f.log('loss', 1)

from lightning.fabric import Fabric
fabric = Fabric('cpu', 'auto', 1, loggers=a)
->
from geartrain import Fabric
fabric = Fabric('cpu', 'auto', 1, plugins=[a])

import lightning.fabric
lightning.fabric.loggers.CSVLogger('x')
->
import geartrain
geartrain.loggers.CSVLogger(path="x/metrics.csv")
"""),
    # Bagua's one class that a script for Lightning needs.
    **_cases("""
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer as Q
Q(p)
->
from geartrain.strategies import QAdamOptimizer as Q
Q(p)

from pytorch_lightning.strategies import BaguaStrategy
BaguaStrategy(algorithm='async', sync_interval_ms=100)
->
from geartrain.strategies import BaguaStrategy
BaguaStrategy(algorithm='async', sync_interval_ms=100)
"""),
    # Other packages.
    **_cases("""
import torch
Trainer(gpus=2)
->
import torch
Trainer(gpus=2)

from .lightning import Trainer
Trainer(gpus=2)
->
from .lightning import Trainer
Trainer(gpus=2)

from lightning_tools import Trainer
Trainer(gpus=2)
->
from lightning_tools import Trainer
Trainer(gpus=2)
"""),
}


@pytest.mark.parametrize("before", OTHERS)
def test_names_and_calls(before):
    done = port(before + "\n")
    assert done.text == OTHERS[before] + "\n"
    assert not done.left


LEFT = _cases("""
import lightning as L
t = L.Trainer()
t.test(ckpt_path='best')
->
callbacks=[ModelCheckpoint(

import lightning as L
t = L.Trainer()
t.fit(net, ckpt_path='hpc')
->
ckpt_path=FILE

import lightning as L
class A(L.LightningModule):
    def training_step(self, b, i):
        self.optimizers().toggle_model()
->
self.toggle_optimizer(optimizer)

import lightning as L
f = L.Fabric(loggers=a, plugins=b)
->
one list: the loggers go into plugins=[...]

from lightning.fabric import Fabric
fabric = Fabric()
fabric.init_tensor(3)
->
torch.tensor(..., device=fabric.device)

import lightning as L
class A:
    fabric: L.Fabric
    def f(self):
        self.fabric.load_raw('a', b)
->
torch.load

from lightning.pytorch import LightningModule
class Net(LightningModule): ...
Net.load_from_checkpoint(path, hparams_file='hparams.yaml')
->
hyperparameters as arguments

import bagua.torch_api as bagua
->
docs/from-bagua.md

from bagua.torch_api.contrib import CachedDataset
->
docs/from-bagua.md

from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
->
BaguaStrategy(algorithm="bytegrad")

model = model.with_bagua([optimizer], algorithm)
->
strategy='bagua'
""")


@pytest.mark.parametrize("before", LEFT)
def test_a_line_that_is_left_names_its_counterpart(before):
    done = port(before + "\n")
    assert [left.line for left in done.left] == [len(before.splitlines())]
    assert LEFT[before] in done.left[0].instead


# --- changes of meaning ---------------------------------------------------------------------------

CHANGED = {
    "Trainer()": [
        "saves a checkpoint after each epoch (enable_checkpointing) and logs to lightning_logs",
        "output=DIR",
    ],
    "Trainer(logger=False)": [
        "Lightning saves a checkpoint after each epoch (enable_checkpointing); here nothing"
    ],
    "Trainer(enable_checkpointing=False)": [
        "Lightning logs to lightning_logs (logger); here nothing is written"
    ],
    "Trainer(default_root_dir='runs')": [
        "output='runs' is the folder of one run, and the next run is refused in it"
    ],
    "Trainer(weights_save_path=folder)": ["output=folder is the folder of one run"],
    "Trainer(fast_dev_run=True, gpus=2)": ["ddp_spawn"],
    "Trainer(fast_dev_run=True, max_steps=9); a.automatic_optimization = False": [
        "max_steps",
        "it counts batches",
        "each optimizer",
    ],
    "Trainer(fast_dev_run=True, track_grad_norm='inf')": ["2-norms", "grad_norm/NAME"],
    "a.automatic_optimization = False; print(trainer.global_step)": [
        "trainer.global_step",
        "it counts batches",
    ],
    "ModelCheckpoint(every_n_train_steps=9, dirpath='a'); a.automatic_optimization = False": [
        "every_n_train_steps",
        "it counts batches",
    ],
    "ModelCheckpoint(monitor='val_loss')": ["its files are in checkpoints, those of all runs"],
    "CSVLogger('logs', name='net')": [
        "CSVLogger(save_dir=...)",
        "one file",
        "the next run is refused",
    ],
}
UNCHANGED = [
    "Trainer(enable_checkpointing=False, logger=False)",
    "Trainer(fast_dev_run=True)",
    "Trainer(output='runs')",
    "Trainer(fast_dev_run=True, max_steps=9)",
    "Trainer(fast_dev_run=True, gpus=1)",
    "Trainer(fast_dev_run=True, gpus=2, strategy='dp')",
    "ModelCheckpoint(dirpath='a', every_n_train_steps=9)",
    "CSVLogger('logs', version=3)",
]
IMPORTS = """\
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
"""


def ported(call):
    imports = [line for line in IMPORTS.splitlines() if line.rpartition(" ")[2] in call]
    return port("\n".join([*imports, f"{call}\n"]))


@pytest.mark.parametrize("call", CHANGED)
def test_a_change_of_meaning_is_listed(call):
    (changed,) = ported(call).changed
    for words in CHANGED[call]:
        assert words in f"{changed.what}: {changed.instead}"


@pytest.mark.parametrize("call", UNCHANGED)
def test_a_call_with_the_same_meaning_is_not_listed(call):
    assert ported(call).changed == ()


def test_a_change_of_meaning_does_not_fail_the_command(command, write):
    write("a.py", IMPORTS.partition("\n")[0] + "\nTrainer(default_root_dir='runs')\n")
    done = command("port a.py --write")
    assert done.code == 0
    assert done.err.startswith(
        "a.py:2: changed: Trainer(default_root_dir=...): output='runs' is the folder of one run"
    )


SAVES = """
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


checkpoint = ModelCheckpoint(monitor="loss", filename="x")
trainer = pl.Trainer(max_epochs=1, progress_bar_refresh_rate=0, callbacks=[checkpoint]{more})
trainer.fit(Net(), torch.utils.data.DataLoader(torch.rand(8, 1)))
"""


@pytest.mark.parametrize(
    ("more", "folder_of"), [("", "checkpoints"), (', default_root_dir="runs"', "runs/checkpoints")]
)
def test_a_model_checkpoint_without_a_folder_gets_one(more, folder_of, folder, monkeypatch):
    text = port(SAVES.replace("{more}", more)).text
    assert ("dirpath" in text) == (not more)
    exec(compile(text, "script.py", "exec"), {"__name__": "script"})
    assert (folder / folder_of / "x.ckpt").exists()
    if not more:  # the next run writes its own file
        exec(compile(text, "script.py", "exec"), {"__name__": "script"})
        assert len(list((folder / folder_of).glob("*.ckpt"))) == 2


# --- LightningCLI ---------------------------------------------------------------------------------

CLI = "from lightning.pytorch.cli import LightningCLI\n"
# In one case the variable `cli` has the name of the function, which therefore keeps its old name.
CLIS = _cases("""
LightningCLI(Net)
->
cli(Net)

LightningCLI(Net, Data, save_config_kwargs={'overwrite': True}, auto_configure_optimizers=False)
->
cli(Net, Data)

LightningCLI(model_class=Net, datamodule_class=Data, args=['fit'])
->
cli(model=Net, data=Data, argv=['fit'])

LightningCLI(Net, Data, None)
->
cli(Net, Data)

LightningCLI(Net, seed_everything_default=42)
->
cli(Net, defaults={'seed': 42})

LightningCLI(Net, seed_everything_default=True, trainer_defaults={})
->
cli(Net)

LightningCLI(Net, trainer_defaults={'gpus': 1, 'max_epochs': 3}, seed_everything_default=1)
->
cli(Net, defaults={'devices': 1, 'accelerator': 'gpu', 'max_epochs': 3, 'seed': 1})

cli = LightningCLI(Net)
cli.trainer.test(cli.model, test_dataloaders=x)
->
cli = LightningCLI(Net)
cli.test(cli.run.module, dataloaders=x)

a = LightningCLI(Net, Data, run=False)
a.trainer.fit(a.model, datamodule=a.datamodule)
print(a.datamodule)
->
a = cli(Net, Data)
print(a.datamodule)
""")


@pytest.mark.parametrize("before", CLIS)
def test_lightning_cli_is_gt_cli(before):
    done = port(f"{CLI}{before}\n")
    alias = " as LightningCLI" if "LightningCLI" in CLIS[before] else ""
    assert done.text == f"from geartrain import cli{alias}\n{CLIS[before]}\n"
    assert not done.left
    assert any(
        "--max-epochs, not --trainer.max_epochs" in changed.instead for changed in done.changed
    )
    again = port(done.text)
    assert (again.text, again.left) == (done.text, ())


@pytest.mark.parametrize(
    ("before", "instead"),
    [
        ("LightningCLI()", "gt.cli(MyModule, MyDataModule)"),
        ("LightningCLI(Net, Data, Saves, 'a.yaml')", "name the arguments"),
        ("LightningCLI(Net, run=False)", "runs fit at once"),
        (
            "a = LightningCLI(Net, run=False)\na.model.prepare()\na.trainer.fit(a.model)",
            "runs fit at once",
        ),
        (
            "a = LightningCLI(Net, run=False)\nif a.model.ready:\n    pass\na.trainer.fit(a.model)",
            "runs fit at once",
        ),
        (
            "a = LightningCLI(Net, run=False)\na.trainer.fit(other, a.datamodule)",
            "runs fit at once",
        ),
        ("LightningCLI(Net, subclass_mode_model=True)", "the class itself"),
        ("LightningCLI(Net, trainer_defaults={'callbacks': [Mine()]})", "--config FILE"),
        ("LightningCLI(Net, trainer_class=Mine)", "--plugin FILE.py"),
        ("LightningCLI(Net, parser_kwargs={'x': 1})", "--config FILE"),
        ("class Mine(LightningCLI): ...", "arguments of their __init__"),
        ("a = LightningCLI(Net)\nprint(a.config)", "gt.cli returns the trainer"),
    ],
)
def test_code_without_a_counterpart_in_gt_cli_is_left(before, instead):
    done = port(f"{CLI}{before}\n")
    (left,) = done.left
    assert instead in left.instead
    # gt.cli refuses run=False, so that it does not train before the next statements.
    assert ("run=False" in done.text) == ("run=False" in before)


def test_a_ported_lightning_cli_runs(folder, monkeypatch, capsys):
    script = (
        SAVES.partition("trainer = ")[0]
        + """
class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.rand(8, 1), batch_size=self.batch_size)


def main():
    from pytorch_lightning.utilities.cli import LightningCLI

    cli = LightningCLI(
        Net, Data, trainer_defaults={"max_epochs": 2, "progress_bar_refresh_rate": 0}, run=False
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    print("steps", cli.trainer.global_step)


main()
"""
    )
    done = port(script)
    assert not done.left
    for arguments, steps in (
        ([], 8),
        (["fit", "--data.batch_size", "4"], 4),
        (["--max-epochs", "1"], 4),
    ):
        monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
        exec(compile(done.text, "script.py", "exec"), {"__name__": "script"})
        assert capsys.readouterr().out == f"steps {steps}\n"


def test_an_import_stays_if_a_line_needs_it():
    for before in ("import lightning.pytorch as pl", "from lightning import pytorch as pl"):
        assert port(f"{before}\npl.tuner.Tuner\n").text == f"{before}\npl.tuner.Tuner\n"
        assert (
            port(f"{before}\npl.tuner.Tuner(pl.Trainer())\n").text
            == f"{before}\nimport geartrain as gt\npl.tuner.Tuner(gt.Trainer())\n"
        )


def test_baguas_module_is_named_and_its_optimizer_ported():
    done = port("from bagua.torch_api.algorithms import q_adam\nq_adam.QAdamOptimizer(p)\n")
    assert done.text.splitlines()[1:] == [
        "from geartrain.strategies import QAdamOptimizer",
        "QAdamOptimizer(p)",
    ]
    assert [left.what for left in done.left] == ["bagua.torch_api.algorithms.q_adam"]


# --- the command ----------------------------------------------------------------------------------

SHORT = "import lightning as L\n\ntrainer = L.Trainer()\n"


def test_prints_a_diff_and_changes_nothing(folder, command, write):
    write("a.py", SHORT)
    done = command("port a.py")
    assert done.code == 0
    assert done.out.splitlines()[:2] == ["--- a/a.py", "+++ b/a.py"]
    assert "-import lightning as L\n+import geartrain as gt\n" in done.out
    assert (folder / "a.py").read_text() == SHORT


def test_git_can_apply_the_diff(folder, command, write):
    write("a.py", text("classic") + "# no line end")
    (folder / "a.diff").write_text(command("port a.py").out)
    git = subprocess.run(
        ["git", "apply", "a.diff"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert git.returncode == 0, git.stderr
    assert (folder / "a.py").read_text() == port(text("classic") + "# no line end").text


def test_o_writes_another_file(folder, command, write):
    write("a.py", SHORT)
    assert command("port a.py -o b.py").code == 0
    assert (folder / "a.py").read_text() == SHORT
    assert "geartrain" in (folder / "b.py").read_text()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_only_regular_files_are_replaced(folder, command, write):
    write("a.py", SHORT)
    os.mkfifo(folder / "pipe")
    done = command("port a.py -o pipe")
    assert (done.code, "pipe exists and is not a regular file" in done.err) == (2, True)
    assert (folder / "pipe").is_fifo()


def test_several_files(folder, command, write):
    write("a.py", SHORT)
    write("b.py", SHORT)
    assert command("port a.py b.py --write").code == 0
    assert "geartrain" in (folder / "a.py").read_text()
    assert "geartrain" in (folder / "b.py").read_text()


def test_line_ends_stay(folder, command):
    (folder / "a.py").write_bytes(SHORT.replace("\n", "\r\n").encode())
    assert command("port a.py --write").code == 0
    after = (folder / "a.py").read_bytes()
    assert after.count(b"\r\n") == after.count(b"\n") == 3


def test_a_file_with_invalid_python_changes_nothing(folder, command, write):
    write("a.py", SHORT)
    write("b.py", "def f(:\n")
    done = command("port a.py b.py --write")
    assert done.code == 2
    assert "b.py, line 1" in done.err
    assert "invalid Python" in done.err
    assert (folder / "a.py").read_text() == SHORT


def test_a_file_without_lightning_stays(command, write):
    write("a.py", "import torch\n")
    done = command("port a.py")
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("port", "Fix: geartrain port train.py"),
        (
            "port a.ipynb",
            "a.ipynb is a notebook.\nFix: run jupyter nbconvert --to script a.ipynb, and port",
        ),
        ("port nowhere.py", "nowhere.py cannot be read"),
        ("port net.py --wirte", "--wirte"),
        ("port net.py my_hooks.py -o b.py", "with one FILE at a time"),
        ("port net.py --write -o b.py", "without --write"),
        ("port net.py -o nowhere/b.py", "cannot be written"),
        ("port net.py -o", "expected one argument"),
    ],
)
def test_wrong_usage(line, words, command):
    done = command(line)
    assert done.code == 2
    assert words in done.err


def test_help_lists_it(command):
    assert "\n  port " in command("--help").out
