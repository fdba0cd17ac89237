"""A run on mps: it trains and cleans up; each limit of MPS is one clear error."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from small_models import Pretend
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain_mps import MPSAccelerator

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    y: torch.Tensor


class Line(gt.Module):
    """A module that fits y = 3x."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(1, 1)
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) * self.scale - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


def loader():
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    return DataLoader(TensorDataset(x, 3 * x), batch_size=8)


# --- a whole run ----------------------------------------------------------------------------------


class Asks:
    """A minimal monitor."""

    @hookimpl
    def on_run_end(self, run):
        (self.stats,) = run.hooks.device_stats(run=run)
        self.device = run.device


def test_trains_and_empties_the_cache(metal, trainer, tmp_path):
    """torch's non-blocking copy to mps reads the batch later: pytorch/pytorch#189690."""
    asks, module = Asks(), Line()
    made = trainer(plugins=[asks], max_epochs=20, output=tmp_path / "run")
    made.fit(module, loader(), loader())
    assert module.net.weight.item() == pytest.approx(3, abs=0.05)
    assert made.callback_metrics["val_loss"] < 0.01
    assert asks.device == torch.device("mps:0")
    assert asks.stats == {"gpu0_memory_used_mib": 300.0, "gpu0_memory_allocated_mib": 200.0}
    assert len(metal.moved) > 3 + 20 * 4 * 2  # parameters, buffer, and two tensors per batch
    assert {non_blocking for _, non_blocking in metal.moved} == {False}
    assert metal.emptied == 1
    again = Line()
    made.validate(again, loader(), ckpt_path=tmp_path / "run" / "last.ckpt")
    assert torch.equal(again.net.weight, module.net.weight)


def test_a_resumed_run_restores_the_device_s_random_state(metal, trainer, tmp_path):
    class Draws(Line):
        def __init__(self):
            super().__init__()
            self.drawn = []

        def training_step(self, batch, batch_idx):
            self.drawn.append(torch.rand((), generator=metal.generator).item())
            return super().training_step(batch, batch_idx)

    def trained(epochs, folder, seed, **given):
        metal.generator.manual_seed(seed)
        module = Draws()
        trainer(max_epochs=epochs, output=tmp_path / folder).fit(module, loader(), **given)
        return module.drawn

    whole = trained(2, "whole", 1)
    begun = trained(1, "parts", 1)
    assert begun + trained(2, "parts", 5, ckpt_path="last") == whole
    assert len(whole) == 8


def test_teardown_without_a_device_does_nothing(metal):
    metal.answers(available=False)
    MPSAccelerator().teardown_device()
    assert metal.emptied == 0


@pytest.mark.parametrize(
    ("words", "dtype"),
    [("the user's text, with the word MPS", torch.float32), ("wrong key", torch.float64)],
)
def test_type_errors_of_the_user_s_code_are_not_changed(metal, trainer, words, dtype):
    class Wrong(Line):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            raise TypeError(words)

    with pytest.raises(TypeError, match=f"^{words}$"):
        trainer().fit(Wrong(), [[torch.ones(2, 1, dtype=dtype)] * 2])
    assert metal.emptied == 1


# --- float64 --------------------------------------------------------------------------------------

ONE, WIDE = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("batch", "place"),
    [
        (WIDE, "batch is"),
        ([ONE, WIDE], "batch[1] is"),
        ((ONE, {"y": WIDE}), "batch[1]['y'] is"),
        ({"x": [ONE, (ONE, WIDE)]}, "batch['x'][1][1] is"),
        (Pair(ONE, WIDE), "batch.y is"),
        ([Item(ONE, WIDE)], "batch[0].y is"),
    ],
)
def test_float64_in_a_batch_is_named_with_its_place_and_the_fix(metal, trainer, batch, place):
    with pytest.raises(TrainingError) as caught:
        trainer().fit(Line(), [batch])
    for words in ("geartrain-mps[mps]", f"{place} float64", "Fix: .float()"):
        assert words in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)
    assert metal.emptied == 1


def test_float64_that_the_module_converts_is_accepted(metal, trainer):
    class Converts(Line):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [tensor.float() for tensor in batch]

    trainer().fit(Converts(), [[WIDE, WIDE]])
    assert {dtype for dtype, _ in metal.moved} == {torch.float32}


def test_float64_in_a_module_is_refused_before_anything_starts(metal, trainer, tmp_path):
    made = trainer(output=tmp_path / "run")
    message = r"geartrain-mps\[mps\]: Line.net.weight is float64.*Fix: module.float\(\)"
    with pytest.raises(UsageError, match=message):
        made.fit(Line().double(), loader())
    module = Line()
    module.scale = module.scale.to(torch.complex128)
    with pytest.raises(UsageError, match=r"Line\.scale is complex128"):
        made.fit(module, loader())
    assert not (tmp_path / "run").exists()
    assert metal.moved == []
    made.check(Line)  # as in `explain`: a class has no parameters yet


# --- plans ----------------------------------------------------------------------------------------


def test_16_mixed_is_refused_if_torchs_scaler_needs_float64(metal, trainer, monkeypatch):
    assert trainer(precision=16).check(Line).precision.name == "16-mixed"

    def unscale_(self, optimizer):
        self._scale.double().reciprocal().float()

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale_)  # as in older versions of torch
    message = r"geartrain-mps\[mps\]: the gradient scaler of torch .*Fix: install a newer torch"
    with pytest.raises(UsageError, match=message):
        trainer(precision=16).check(Line)
    trainer(precision="bf16").check(Line)


DDP = r"geartrain-ddp\[ddp\].*torch.distributed.*"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": 64}, r"precision 64-true.*Fix: --precision 32-true"),
        ({"strategy": "ddp"}, f"{DDP}--strategy single"),
        ({"strategy": "ddp", "num_nodes": 2}, f"{DDP}--num-nodes 1"),
        ({"strategy": "ddp2"}, r"geartrain-dp\[ddp2\].*torch.distributed"),
        ({"strategy": "dp"}, "dp splits batches.*--strategy single"),
    ],
)
def test_plans_that_mps_cannot_run_are_refused(metal, trainer, options, message):
    with pytest.raises(UsageError, match=rf"geartrain-mps\[mps\].*{message}"):
        trainer(**options).check(Line)


class TwoNodes(Pretend):
    """A third-party strategy."""

    planned = gt.Layout(None, 1)


def test_a_backend_that_declares_mps_tensors_is_accepted(metal, trainer, monkeypatch):
    made = trainer(strategy=TwoNodes())
    with pytest.raises(UsageError, match=r"TwoNodes needs torch\.distributed"):
        made.check(Line)
    capability = {**torch.distributed.Backend.backend_capability, "thunder": ["cpu", "mps"]}
    monkeypatch.setattr(torch.distributed.Backend, "backend_capability", capability)
    made.check(Line)


def test_torch_s_backends_do_not_take_mps_tensors():
    """If one does in the future, the refusal ends by itself and docs/devices.md must change."""
    for backend in ("gloo", "nccl", "mpi", "ucc"):
        assert "mps" not in torch.distributed.Backend.backend_capability[backend]
