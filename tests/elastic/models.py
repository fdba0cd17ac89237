"""The module that the tests of elastic train; it may end or stop its process, hang, or raise."""

import itertools
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import geartrain as gt
from geartrain.callbacks import EMA, Callback


class Samples(Dataset):
    """Samples with random noise."""

    def __init__(self, count, noise=0.1):
        self.count, self.noise = count, noise

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x + self.noise * torch.rand(4) if self.noise else x, x.sum().sin().reshape(1)


class Count(Callback):
    """A callback that counts steps and sums up losses, and has no state_dict."""

    def __init__(self):
        self.steps = 0

    def on_fit_start(self, trainer, pl_module):
        self.losses = getattr(pl_module, "losses", [])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        pl_module.log("steps", float(self.steps), on_step=True, sync_dist=True)
        pl_module.log("losses", float(sum(self.losses)), on_step=True, sync_dist=True)


def flaky(module):
    raise OSError("the network was away")


def without_logs(module):
    shutil.rmtree(module.trainer.run.output / "logs")
    os.kill(os.getpid(), signal.SIGKILL)


#: The ways in which a rank may fail.
WAYS = {
    "kill": lambda module: os.kill(os.getpid(), signal.SIGKILL),
    "real-time signal": lambda module: os.kill(os.getpid(), 40),
    "stop": lambda module: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda module: threading.Event().wait(),
    "error": flaky,
    "without logs": without_logs,
}


class Net(gt.Module):
    """Has BatchNorm, dropout, a schedule per step, and logged values.

    Args:
        flags: the folder that shows which kills have happened.
        kills: tuples (method, step, rank, way): fail there, once for each; default: SIGKILL.
        raises: a triple as above: an error there, each time.
        slow: seconds of each step.
    """

    def __init__(self, flags=None, kills=(), raises=None, slow=0.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)
        )
        self.flags, self.kills, self.raises, self.slow = flags, kills, raises, slow

    def at(self, method):
        place = (method, self.trainer.global_step, self.trainer.global_rank)
        if place == self.raises:
            raise ValueError("my own error")
        for number, kill in enumerate(self.kills):
            flag = Path(self.flags, f"killed-{number}")
            if kill[:3] == place and not flag.exists():
                flag.touch()
                WAYS[kill[3] if len(kill) > 3 else "kill"](self)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.layers(x) - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        time.sleep(self.slow)
        self.at("training_step")
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", (self.layers(x) - y).square().mean(), sync_dist=True)
        self.at("validation_step")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.at("on_train_batch_end")

    def on_train_epoch_end(self):
        self.at("on_train_epoch_end")

    def on_fit_end(self):
        self.at("on_fit_end")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Forgetful(Net):
    """Has state that no checkpoint has."""

    def __init__(self, **options):
        super().__init__(**options)
        self.factor, self.losses, self.random = 1.0, [], random.Random(1)
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.scale = torch.ones(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean.lerp_(x.mean(dim=0), 0.1)
        self.scale.data.add_(0.5)
        self.factor *= 0.9 + 0.2 * self.random.random()
        loss = self.factor * super().training_step((x - self.mean, y), batch_idx)
        self.losses.append(loss)
        return loss

    def on_train_epoch_end(self):
        self.log("mean_loss", torch.stack(self.losses).mean() * self.scale, sync_dist=True)
        self.losses.clear()
        super().on_train_epoch_end()


class Counting(Net):
    """Its gradients depend on an object that elastic does not copy."""

    def __init__(self, **options):
        super().__init__(**options)
        self.steps = itertools.count(1)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * next(self.steps)

    def on_before_optimizer_step(self, optimizer):
        self.at("on_before_optimizer_step")


class Widens(Net):
    """Logs another name in each step."""

    def training_step(self, batch, batch_idx):
        self.log(f"of_step_{self.global_step}", 1.0)
        return super().training_step(batch, batch_idx)


class Saved:
    """Calls the module's ``at`` when a checkpoint is saved."""

    @gt.hookimpl
    def on_checkpoint_saved(self, run):
        run.module.at("on_checkpoint_saved")


class Stops(Net):
    """Rank 1 asks for the end of training in its second step."""

    def training_step(self, batch, batch_idx):
        if (self.global_step, self.global_rank) == (1, 1):
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Data(gt.DataModule):
    """Has a level, which its samples have and which rises with each epoch; see :class:`Rises`."""

    def __init__(self):
        super().__init__()
        self.level = 0

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]

    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x + self.level, x.sum().sin().reshape(1)

    def train_dataloader(self):
        return DataLoader(self, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self, batch_size=4)


class Curriculum(Data):
    """Has one batch more for each level that it has when its loader is made."""

    def train_dataloader(self):
        return DataLoader(range(16 + 4 * self.level), batch_size=4, collate_fn=self.collate)

    def collate(self, numbers):
        return torch.utils.data.default_collate([self[number] for number in numbers])


class Rises(Net):
    """Raises the level of its data module in an event, also of an epoch's start."""

    def __init__(self, event, **options):
        super().__init__(**options)
        setattr(self, event, self.rise)

    def rise(self):
        self.trainer.datamodule.level += 1


def fit(
    folder,
    devices,
    virtual_ranks=2,
    strategy="elastic",
    workers=0,
    net=None,
    kind=Forgetful,
    resume=None,
    data=None,
    **options,
):
    """Train in a folder; return the trainer and the module."""
    torch.manual_seed(0)
    module = kind(**(net or {}))
    options = {"max_epochs": 2, "log_every_n_steps": 2, **options}
    elastic = {"virtual_ranks": virtual_ranks, **options.pop("strategy_options", {})}
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy=strategy,
        strategy_options=elastic if strategy == "elastic" else None,
        devices=devices,
        seed=1,
        output=folder,
        enable_progress_bar=False,
        callbacks=[Count(), EMA(decay=0.8)],
        **options,
    )
    loader = DataLoader(Samples(38), batch_size=4, shuffle=True, num_workers=workers)
    validation = DataLoader(Samples(9, noise=0.0), batch_size=2)
    loaders = {"datamodule": data} if data else {"train_dataloaders": loader}
    loaders |= {} if data else {"val_dataloaders": validation}
    trainer.fit(module, **loaders, ckpt_path=resume)
    return trainer, module


def state(folder, module):
    """Return what must be equal: weights, the lines of metrics, the optimizer's state."""
    saved = torch.load(Path(folder, "last.ckpt"), weights_only=True)
    optimizer = saved["fit"]["optimizers"][0]["state"]["state"]
    tensors = [*module.state_dict().values(), *(t for s in optimizer.values() for t in s.values())]
    return [t.tolist() for t in tensors], Path(folder, "metrics.jsonl").read_text()
