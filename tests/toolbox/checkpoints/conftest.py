"""Run each test in an own folder. ``saved`` trains once and copies the run's folder."""

import shutil

import pytest
import torch
from command_line import command, folder, installed, refused
from small_models import Net, loader, trainer

from geartrain import hookimpl
from geartrain.callbacks import EMA, ModelCheckpoint

__all__ = ["command", "folder", "installed", "refused"]

#: What a terminal would obey: red, and a title.
EVIL = "a\x1b[31m\x9b2J\x7f\u202eb"


class Unreadable:
    """Keeps a state that no checkpoint can hold."""

    @hookimpl
    def on_step_end(self):
        pass

    def state_dict(self):
        return {"file": object()}

    def load_state_dict(self, state):
        pass


class Validated(Net):
    def __init__(self, width: int = 4, name: str = EVIL):
        super().__init__(torch.optim.Adam)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a run: three epochs of six steps, the two best, an average of the weights."""
    home = tmp_path_factory.mktemp("trained")
    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}")
    run = trainer(output=home / "run", max_epochs=3, plugins=[best, EMA(), Unreadable()], seed=1)
    with pytest.warns(UserWarning, match="leave it out"):
        run.fit(Validated(), loader(), loader())
    return home / "run"


@pytest.fixture
def run(trained, folder):
    """A copy of ``trained`` in the test's folder."""
    return shutil.copytree(trained, folder / "run")
