"""Train under horovodrun's elastic mode: ``python growing.py FOLDER``.

Each process writes a note after each step, and its weights at the end. At step ``HOLD`` it waits
for ``FOLDER/go``. It creates ``FOLDER/heard`` when Horovod reports that hosts have changed. At step
``FAIL`` rank 1 raises.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from horovod.common.elastic import notification_manager
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain import hookimpl

FOLDER = Path(sys.argv[1])
HOLD, FAIL = int(os.environ.get("HOLD", "-1")), int(os.environ.get("FAIL", "-1"))
EPOCHS, SAMPLES, BATCH = 4, 32, 4


class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.constant_(self.layer.weight, 0.1)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == FAIL and self.trainer.global_rank == 1:
            raise KeyError("an error of the user's code")
        loss = mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


class Diary:
    """Writes rank, world size, counters and learning rate after each step."""

    def __init__(self):
        self.file = (FOLDER / f"diary-{os.getpid()}").open("a")

    @hookimpl
    def on_step_end(self, run):
        rate = run.optimizers[0].param_groups[0]["lr"]
        note = {
            "rank": run.world.rank,
            "size": run.world.size,
            "step": run.step,
            "epoch": run.epoch,
            "batch": run.batch_idx,
            "lr": rate,
        }
        self.file.write(json.dumps(note) + "\n")
        self.file.flush()
        if run.step == HOLD and not (FOLDER / "go").exists():
            (FOLDER / f"held-{run.world.rank}").write_text(str(os.getpid()))
            while not (FOLDER / "go").exists():
                time.sleep(0.02)

    @hookimpl
    def on_exception(self, error):
        self.file.write(json.dumps({"error": type(error).__name__}) + "\n")
        self.file.flush()


class Hears:
    """A listener in addition to the strategy's."""

    def on_hosts_updated(self, timestamp, result):
        (FOLDER / "heard").touch()


notification_manager.register_listener(Hears())
random = torch.Generator().manual_seed(0)
x = torch.randn(SAMPLES, 3, generator=random)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)
options = {"elastic": True, **json.loads(os.environ.get("OPTIONS", "{}"))}
trainer = gt.Trainer(
    accelerator="cpu",
    strategy="horovod",
    strategy_options=options,
    plugins=[Diary(), "csv"],
    plugin_options={"csv": {"path": str(FOLDER / "metrics.csv")}},
    max_epochs=EPOCHS,
    output=FOLDER / "run",
    enable_progress_bar=False,
    log_every_n_steps=1,
    seed=3,
)
model = Net()
trainer.fit(model, loader)
world = trainer.run.world
counts = {
    "step": trainer.global_step,
    "epoch": trainer.current_epoch,
    "size": world.size,
    "resumes": trainer.run.plan.resumes,
}
end = {"weights": model.state_dict(), **counts}
torch.save(end, FOLDER / f"end-{world.rank}.pt")
