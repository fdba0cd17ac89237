"""A fit that resumes has the rates of an uninterrupted one, with every scheduler of torch."""

import inspect
import warnings

import pytest
import torch
from small_models import trainer
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR, SequentialLR

import geartrain as gt
from geartrain import TrainingError

STEPS, STOPPED = 12, 5


class Decay:
    """A function with state, which LambdaLR keeps."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 1 / (1 + self.calls)


#: Those that SequentialLR of torch cannot step.
NOT_NESTED = {"ReduceLROnPlateau", "SequentialLR", "ChainedScheduler"}
#: Each scheduler of torch -> how to make it. A new one of torch fails the first test.
MAKE = {
    "ChainedScheduler": lambda o: ChainedScheduler([LinearLR(o, 0.1), ExponentialLR(o, 0.9)]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Decay()),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "LinearLR": lambda o: LinearLR(o, 0.1, total_iters=8),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 6, 6, 9]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Decay()),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=7),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.1), ExponentialLR(o, 0.9)], [3]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
}


def schedulers_of_torch():
    """Return the names of all schedulers of torch that a user may make."""
    base = lr_scheduler.LRScheduler
    return {
        name
        for module in (lr_scheduler, swa_utils)
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and issubclass(cls, base) and cls.__name__ == name
    } - {"LRScheduler", "_LRScheduler"}


def test_every_scheduler_of_torch_is_tried():
    assert schedulers_of_torch() == set(MAKE)


class Rates(gt.Module):
    """Has one weight, optimizer and scheduler for each maker."""

    def __init__(self, makers, interval="epoch"):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(1) for _ in makers)
        self.makers, self.interval, self.rates = makers, interval, []

    def training_step(self, batch, batch_idx):
        self.rates.append([o.param_groups[0]["lr"] for o in self.trainer.optimizers])
        self.log("loss", 1.0, on_step=True, on_epoch=True)
        return sum(weight.sum() for weight in self.weights) * batch.sum()

    def configure_optimizers(self):
        optimizers = [optimizer_of(weight) for weight in self.weights]
        each = {"interval": self.interval, "monitor": "loss"}
        made = [make(o) for make, o in zip(self.makers, optimizers, strict=True)]
        return optimizers, [{"scheduler": scheduler, **each} for scheduler in made]


def optimizer_of(weight):
    return torch.optim.SGD([weight], lr=1.0, momentum=0.5)


def rates(folder, makers, interval, epochs, path=None):
    """Fit, with a step an epoch if schedulers step by epochs; return the rates of each step."""
    module = Rates(makers, interval)
    batches = [torch.ones(1)] * (1 if interval == "epoch" else STOPPED)
    trainer(output=folder, max_epochs=epochs).fit(module, batches, ckpt_path=path)
    return module.rates


def nested():
    """Yield a name and a maker for each scheduler: alone, and inside those that have others."""
    for name, make in MAKE.items():
        yield name, make
        yield (
            f"{name} in SequentialLR",
            lambda o, make=make: SequentialLR(o, [ExponentialLR(o, 0.8), make(o)], [2]),
        )
        yield (
            f"{name} in ChainedScheduler",
            lambda o, make=make: ChainedScheduler([make(o), ExponentialLR(o, 0.9)]),
        )
        yield (
            f"{name} in SequentialLR in ChainedScheduler",
            lambda o, make=make: ChainedScheduler(
                [SequentialLR(o, [make(o), LinearLR(o, 0.2)], [7]), ExponentialLR(o, 0.9)]
            ),
        )


def works_by_hand(make):
    """True if torch itself can step it without a metric."""
    optimizer = optimizer_of(torch.nn.Parameter(torch.ones(1)))
    try:
        scheduler = make(optimizer)
        for _ in range(20):
            optimizer.step()
            scheduler.step()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.filterwarnings("ignore:::torch")
@pytest.mark.filterwarnings("error:(?s).*cannot be read as data alone")
def test_rates_go_on(tmp_path, interval):
    makers = {n: make for n, make in nested() if n == "ReduceLROnPlateau" or works_by_hand(make)}
    assert set(MAKE) <= makers.keys()
    assert all(f"{name} in SequentialLR" in makers for name in set(MAKE) - NOT_NESTED)
    stopped, end = (STOPPED, STEPS) if interval == "epoch" else (1, 2)
    whole = rates(tmp_path / "whole", [*makers.values()], interval, end)
    first = rates(tmp_path / "run", [*makers.values()], interval, stopped)
    rest = rates(tmp_path / "run", [*makers.values()], interval, end, "last")
    resumed = zip(*first, *rest, strict=True)
    pairs = zip(makers, resumed, zip(*whole, strict=True), strict=True)
    assert not {name: (b, a) for name, b, a in pairs if a != b}


class Unreadable(ExponentialLR):
    def state_dict(self):
        return {**super().state_dict(), "function": abs}


class Stateless:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("make", [lambda o: Unreadable(o, 0.9), Stateless])
def test_a_state_that_is_missing_is_no_new_scheduler(tmp_path, make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rates(tmp_path, [make], "epoch", 2)
    with pytest.raises(TrainingError, match=r"state of (Unreadable|Stateless) .* has none\. Fix: "):
        rates(tmp_path, [make], "epoch", 3, "last")
