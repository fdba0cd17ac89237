"""Train on ``tpu:0`` of the real torch_tpu, whose runtime is a stand-in (see conftest.py).

Each test trains on the tpu before it trains on the CPU: torch counts devices in the process's
first backward.
"""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain import UsageError, hookimpl

pytestmark = pytest.mark.tpu

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


class MLP(gt.Module):
    def __init__(self, optimizer=OPTIMIZERS["Adam"], dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10)]
        self.net, self.optimizer, self.losses = nn.Sequential(*layers), optimizer, []

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class CNN(MLP):
    def __init__(self, optimizer=OPTIMIZERS["Adam"]):
        super().__init__(optimizer)
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), *layers, nn.Flatten(), nn.Linear(64, 10)
        )


def loader(n=320, **options):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(n, 64, generator=random)
    y = torch.randint(0, 10, (n,), generator=random)
    return DataLoader(TensorDataset(x, y), batch_size=16, **options)


def trainer(accelerator, **options):
    defaults = {"devices": 1, "max_steps": 20, "seed": 1, "enable_progress_bar": False}
    return gt.Trainer(accelerator=accelerator, **defaults | options)


def losses(accelerator, make, **options):
    module = make()
    trainer(accelerator, **options).fit(module, loader())
    return torch.tensor([float(loss) for loss in module.losses])


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("module", [MLP, CNN])
def test_losses_are_those_of_the_cpu(tpu, module, optimizer):
    found = losses(tpu(), partial(module, optimizer))
    expected = losses("cpu", partial(module, optimizer))
    assert len(found) == 20
    assert (found - expected).abs().max() < 1e-5


def test_bf16_mixed(tpu):
    found, expected = (losses(a, MLP, precision="bf16-mixed") for a in (tpu(), "cpu"))
    assert (found - expected).abs().max() < 1e-2


def test_a_resume_draws_the_same_dropout(tpu, tmp_path):
    make = partial(MLP, dropout=0.5)
    whole, rest = make(), make()
    trainer(tpu(), max_steps=40).fit(whole, loader())
    trainer(tpu(), max_steps=20, output=tmp_path).fit(make(), loader())
    trainer(tpu(), max_steps=40, output=tmp_path).fit(rest, loader(), ckpt_path="last")
    for a, b in zip(whole.state_dict().values(), rest.state_dict().values(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_an_evaluation_and_two_fits_of_one_process(tpu):
    one, module = trainer(tpu(), max_steps=-1, max_epochs=1), MLP()
    (before,) = one.validate(module, loader())
    one.fit(module, loader(), loader())
    one.fit(module, loader(), loader())
    (after,) = one.validate(module, loader())
    assert after["val_loss"] < before["val_loss"]


def test_a_loader_that_pins_memory_is_told(tpu):
    with pytest.warns(UserWarning, match="cannot pin memory. Fix: pin_memory=False"):
        trainer(tpu()).fit(MLP(), loader(pin_memory=True))


def test_compile(tpu):
    found = losses(tpu(), MLP, plugins=["compile"])
    assert (found - losses("cpu", MLP)).abs().max() < 1e-5


def test_ddp_of_one_rank_uses_the_backend_of_the_tpu(tpu):
    class Backend:
        @hookimpl
        def on_train_start(self):
            self.name = torch.distributed.get_backend()

    backend = Backend()
    found = losses(tpu(), MLP, strategy="ddp", plugins=[backend])
    assert backend.name == torch.distributed.Backend.default_device_backend_map["tpu"] != "gloo"
    assert (found - losses("cpu", MLP)).abs().max() < 1e-5


def test_a_step_copies_nothing_to_the_host(tpu, stand_in):
    class Counts:
        def __init__(self):
            self.copies = []

        @hookimpl
        def on_step_end(self):
            self.copies.append(stand_in.stand_in_host_copies())

    counts = Counts()
    trainer(tpu(), plugins=[counts]).fit(MLP(), loader())
    assert counts.copies[-1] == counts.copies[5]
    assert counts.copies[-1] > 0 or stand_in.stand_in_host_copies() > 0  # the weights come back


# --- chips that are not here ----------------------------------------------------------------------


@pytest.fixture
def eight_chips(monkeypatch, tmp_path):
    """Let torch_tpu find eight chips of a TPU v5e in a folder."""
    from torch_tpu._internal.utils import hardware

    bus, groups = tmp_path / "bus", tmp_path / "vfio"
    groups.mkdir()
    for number in range(8):
        chip = bus / f"0000:00:{number:02}.0"
        chip.mkdir(parents=True)
        (chip / "vendor").write_text("0x1ae0\n")
        (chip / "device").write_text("0x0063\n")
        (groups / str(number)).write_text("")
        (chip / "iommu_group").symlink_to(groups / str(number))
    places = {"/sys/bus/pci/devices": bus, "/dev/vfio": groups}

    class Pathlib:
        @staticmethod
        def Path(text):
            return places[text]

    monkeypatch.setattr(hardware, "pathlib", Pathlib)


def test_eight_chips_are_eight_processes(eight_chips):
    plan = gt.Trainer(accelerator="tpu", devices=8).plan
    assert (plan.processes, plan.accelerator.name) == (8, "tpu")
    assert gt.Trainer(accelerator="auto").plan.accelerator.name == "tpu"


@pytest.mark.parametrize("devices", [2, 3])
def test_devices_that_form_no_mesh_are_refused(eight_chips, devices):
    with pytest.raises(UsageError, match=rf"{devices} devices of this TPU form no mesh.*Fix"):
        trainer("tpu", devices=devices).fit(MLP(), loader())


def test_ranks_get_the_variables_of_torch_tpu(eight_chips, monkeypatch, tmp_path):
    import os

    class Prints:
        """Ends each rank before a device starts."""

        @hookimpl(wrapper=True)
        def setup_device(self, local_rank):
            names = ("TORCH_TPU_TOPOLOGY", "TORCH_TPU_SLICEBUILDER_ADDRESSES", "RANK")
            found = {name: os.environ.get(name) for name in names}
            (tmp_path / f"{local_rank}.json").write_text(json.dumps(found))
            raise RuntimeError("enough")
            yield

    with pytest.raises(Exception, match="enough"):
        trainer("tpu", devices=4, strategy="ddp_spawn", plugins=[Prints()]).fit(MLP(), loader())
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert {each["TORCH_TPU_TOPOLOGY"] for each in found} == {"2,2,1"}
    assert len({each["TORCH_TPU_SLICEBUILDER_ADDRESSES"] for each in found}) == 1
    assert len(found[0]["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")) == 4
    with pytest.raises(UsageError, match=r"set up for 4 ranks. Fix: start 8 in a new process"):
        trainer("tpu", devices=8, strategy="ddp_spawn").fit(MLP(), loader())


def test_ranks_of_a_launcher_need_the_variables(eight_chips, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UsageError, match=r"the launcher's ranks have no TORCH_TPU.*Fix: eval"):
        trainer("tpu", devices=4, strategy="ddp").fit(MLP(), loader())


def test_without_a_chip_there_is_one_error():
    with pytest.raises(UsageError, match=r"there is no TPU on this machine's PCI bus. Fix"):
        gt.Trainer(accelerator="tpu", devices=8)
