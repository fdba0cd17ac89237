"""LearningRateMonitor: Lightning's names, and the rate that a step used."""

import pytest
import torch
from small_models import SGD, EvalNet, Loggers, Net, fit, loader
from torch.optim.lr_scheduler import LambdaLR

from geartrain import UsageError
from geartrain.callbacks import LearningRateMonitor


def halves(optimizer, interval="epoch", name=None):
    """Return a scheduler that halves the rate."""
    return {"scheduler": LambdaLR(optimizer, lambda n: 0.5**n), "interval": interval, "name": name}


class Made(Net):
    """A net whose ``configure_optimizers`` is a function of the module."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self)


def logged(make, *arguments, **options):
    """Return ``(step, learning rates)`` of each flush of a net trained on 6 batches an epoch."""
    loggers = Loggers()
    fit(
        Made(make),
        plugins=[LearningRateMonitor(*arguments), loggers],
        **{"log_every_n_steps": 1, **options},
    )
    return loggers.lines


def names(make, *arguments):
    return sorted({name for _, metrics in logged(make, *arguments) for name in metrics})


def first(module):
    return SGD(module.layers[0].parameters())


def last(module):
    return SGD(module.layers[2].parameters())


def groups(module, *more):
    first, last = module.layers[0].parameters(), module.layers[2].parameters()
    more = more or ({}, {})
    return torch.optim.SGD([{"params": first, **more[0]}, {"params": last, **more[1]}], lr=0.1)


def both(module):
    return [first(module), last(module)]


def scheduled(module, **options):
    optimizer = SGD(module.parameters())
    return {"optimizer": optimizer, "lr_scheduler": halves(optimizer, **options)}


def second_scheduled(module):
    a, b = both(module)
    return [a, b], [halves(b)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda m: SGD(m.parameters()), ["lr-SGD"]),
        (both, ["lr-SGD", "lr-SGD-1"]),
        (lambda m: [first(m), torch.optim.Adam(m.layers[2].parameters())], ["lr-Adam", "lr-SGD"]),
        (groups, ["lr-SGD/pg1", "lr-SGD/pg2"]),
        (lambda m: groups(m, {"name": "body"}, {"name": "head"}), ["lr-SGD/body", "lr-SGD/head"]),
        (lambda m: SGD([{"params": m.parameters(), "name": "all"}]), ["lr-SGD/all"]),
        (lambda m: scheduled(m, name="my_rate"), ["my_rate"]),
        (second_scheduled, ["lr-SGD", "lr-SGD-1"]),
    ],
)
def test_names(make, expected):
    assert names(make) == expected


def test_momentum_and_weight_decay():
    def make(module):
        options = {"lr": 0.2, "betas": (0.7, 0.9), "weight_decay": 0.3}
        adam = torch.optim.AdamW(module.layers[2].parameters(), **options)
        return [SGD(module.layers[0].parameters(), momentum=0.8), adam]

    values = logged(make, "step", True, True)[0][1]
    assert values == {
        "lr-SGD": 0.1,
        "lr-SGD-momentum": 0.8,
        "lr-SGD-weight_decay": 0.0,
        "lr-AdamW": 0.2,
        "lr-AdamW-momentum": 0.7,
        "lr-AdamW-weight_decay": 0.3,
    }


@pytest.mark.parametrize(("flush", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_a_flushed_steps_rate_is_the_one_that_it_was_taken_with(flush, steps):
    lines = logged(lambda m: scheduled(m, interval="step"), log_every_n_steps=flush)
    assert lines == [(n, {"lr-SGD": pytest.approx(0.1 * 0.5 ** (n - 1))}) for n in steps]


def test_a_scheduler_of_epochs_is_logged_each_epoch():
    lines = logged(scheduled, max_epochs=3)
    assert lines == [
        (6 * (epoch + 1), {"lr-SGD": pytest.approx(0.1 * 0.5**epoch)}) for epoch in range(3)
    ]


@pytest.mark.parametrize(("interval", "count"), [("step", 12), ("epoch", 2)])
def test_an_interval_that_is_given_holds_for_all(interval, count):
    assert len(logged(lambda m: scheduled(m, interval="step"), interval, max_epochs=2)) == count


def test_a_rate_that_is_a_tensor_is_logged_as_it_was():
    def make(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.1))
        return {"optimizer": optimizer, "lr_scheduler": halves(optimizer, "step")}

    rates = [metrics["lr-SGD"] for _, metrics in logged(make)]
    assert rates == pytest.approx([0.1 * 0.5**step for step in range(6)])


def test_two_groups_of_one_name_are_refused_before_training():
    message = r"geartrain-callbacks\[lr_monitor\]: two parameter groups are called lr-SGD/same. Fix"
    with pytest.raises(UsageError, match=message):
        logged(lambda m: groups(m, {"name": "same"}, {"name": "same"}))


def test_the_logged_rates_can_be_read_after_fit():
    def make(module):
        optimizer = SGD(module.parameters(), momentum=0.8, weight_decay=0.3)
        return {"optimizer": optimizer, "lr_scheduler": halves(optimizer, "step")}

    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    one = fit(Made(make), plugins=[monitor], log_every_n_steps=2)
    rates = [pytest.approx(0.1 * 0.5**step) for step in (1, 3, 5)]
    assert monitor.lrs == {"lr-SGD": rates}
    assert monitor.last_momentum_values == {"lr-SGD-momentum": 0.8}
    assert monitor.last_weight_decay_values == {"lr-SGD-weight_decay": 0.3}
    one.validate(EvalNet(), loader())
    assert monitor.lrs == {"lr-SGD": rates}
    one.fit(Made(lambda m: SGD(m.parameters())), loader())
    assert monitor.lrs == {"lr-SGD": [0.1, 0.1, 0.1]}
