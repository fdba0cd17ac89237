"""The forms of configure_optimizers, and the steps of optimizers and schedulers."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from small_models import (
    EvalNet,
    Net,
    Stream,
    assert_equal,
    by_hand,
    differ,
    fit,
    loader,
    trainer,
    weights,
)
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from geartrain import GeartrainError, UsageError
from geartrain.parallel import SeveralRanks
from geartrain.plugin_api import RankCoordinator


class Configured(EvalNet):
    """Has two optimizers and schedulers; ``configure_optimizers`` returns ``what(self)``."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.first, self.second = (
            torch.optim.SGD(self.layers[i].parameters(), lr=1.0) for i in (0, 2)
        )
        self.halve, self.third = ExponentialLR(self.first, 1 / 2), ExponentialLR(self.second, 1 / 3)

    def configure_optimizers(self):
        return self.what(self)

    @property
    def rates(self):
        return tuple(optimizer.param_groups[0]["lr"] for optimizer in (self.first, self.second))


def plateau(net, **options):
    return {"scheduler": ReduceLROnPlateau(net.first, factor=0.5, patience=0), **options}


def on_plateau(**options):
    """Return a ``what`` that returns an optimizer, and ReduceLROnPlateau with these options."""
    return lambda net: {"optimizer": net.first, "lr_scheduler": plateau(net, **options)}


def scheduled(**options):
    """Return a ``what`` that returns an optimizer, and its scheduler with these options."""
    return lambda net: {
        "optimizer": net.first,
        "lr_scheduler": {"scheduler": net.halve, **options},
    }


# --- forms ----------------------------------------------------------------------------------------

FORMS = {
    "optimizer": (lambda n: n.first, (1, 1)),
    "tuple": (lambda n: (n.first, n.second), (1, 1)),
    "list of one": (lambda n: [n.first], (1, 1)),
    "list of two lists": (lambda n: [[n.first], [n.halve]], (1 / 4, 1)),
    "two lists, one scheduler": (lambda n: ([n.first, n.second], [n.third]), (1, 1 / 9)),
    "two lists, no scheduler": (lambda n: ([n.first], []), (1, 1)),
    "two lists with a dict": (
        lambda n: ([n.first], [{"scheduler": n.halve, "interval": "epoch"}]),
        (1 / 4, 1),
    ),
    "dict without": (lambda n: {"optimizer": n.first, "lr_scheduler": None}, (1, 1)),
    "dict with a dict": (scheduled(name="lr"), (1 / 4, 1)),
    "list of dicts": (
        lambda n: [{"optimizer": n.first}, {"optimizer": n.second, "lr_scheduler": n.third}],
        (1, 1 / 9),
    ),
    "monitor beside the scheduler": (
        lambda n: {
            "optimizer": n.first,
            "lr_scheduler": plateau(n)["scheduler"],
            "monitor": "val_loss",
        },
        (1, 1),
    ),
}


@pytest.mark.parametrize(("what", "rates"), FORMS.values(), ids=FORMS)
def test_forms(what, rates):
    """After two epochs, by which every scheduler has stepped twice."""
    net = Configured(what)
    before = weights(net)
    fit(net, val=loader(), max_epochs=2)
    assert net.rates == pytest.approx(rates)
    assert differ(net, before)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda n: "sgd", "configure_optimizers returned 'sgd'"),
        (lambda n: [], r"returned \[\]"),
        (lambda n: [n.first, n.halve], "configure_optimizers returned"),
        (lambda n: ([], [n.halve]), "configure_optimizers returned"),
        (lambda n: {"optimizer": n.parameters()}, "no optimizer"),
        (lambda n: {"optimizer": n.first, "scheduler": n.halve}, "'scheduler'"),
        (
            lambda n: ({"optimizer": n.first, "frequency": 1}, {"optimizer": n.second}),
            "'frequency'.*every optimizer steps",
        ),
        (lambda n: ([n.first], ["cosine"]), "'cosine' is not a scheduler"),
        (scheduled(intervall="step"), "Did you mean 'interval'"),
        (lambda n: {"optimizer": n.first, "lr_scheduler": {"interval": "step"}}, "scheduler"),
        (scheduled(interval="batch"), "'epoch' or 'step'"),
        (scheduled(frequency=0), "at least 1"),
        (lambda n: {"optimizer": n.first, "lr_scheduler": plateau(n)}, "monitor"),
        (lambda n: ([n.first], [plateau(n)["scheduler"]]), "monitor"),
    ],
)
def test_wrong_forms(what, words):
    with pytest.raises(UsageError, match=words):
        fit(Configured(what))


class Wraps(torch.optim.SGD):
    """Steps the groups of another optimizer, as SAM does."""

    def __init__(self, inner):
        super().__init__([{"params": group["params"]} for group in inner.param_groups], lr=1.0)
        self.param_groups = inner.param_groups


@pytest.mark.parametrize(
    "what",
    [
        lambda n: ([n.first], [n.halve, {"scheduler": n.third, "interval": "step"}]),
        lambda n: {"optimizer": n.first, "lr_scheduler": n.third},
    ],
)
def test_a_scheduler_of_an_optimizer_that_is_not_returned_is_refused(what):
    with pytest.raises(
        UsageError, match=r"is of SGD, which was not returned.*Fix: return that optimizer"
    ):
        fit(Configured(what))


def test_a_scheduler_of_an_optimizer_whose_groups_are_stepped_is_not():
    net = Configured(lambda n: ([Wraps(n.first)], [n.halve]))
    fit(net)
    assert net.rates[0] == 0.5


def test_none_steps_nothing_and_warns():
    net = Configured(lambda n: None)
    before = weights(net)
    with pytest.warns(UserWarning, match="nothing is stepped"):
        done = fit(net)
    assert_equal(net, before)
    assert done.run.optimizers == []


# --- optimizers -----------------------------------------------------------------------------------


def test_parameters_without_an_optimizer_are_not_changed():
    net = Configured(lambda n: n.first)
    second, before = weights(net.layers[2]), weights(net.layers[0])
    fit(net)
    assert_equal(net.layers[2], second)
    assert differ(net.layers[0], before)


def test_the_module_finds_its_optimizers_and_schedulers():
    class Asks(Configured):
        asked = None

        def on_train_start(self):
            self.asked = self.optimizers(), self.lr_schedulers()

    def asked(what):
        net = Asks(what)
        fit(net)
        return net, net.asked

    net, found = asked(lambda n: n.first)
    assert found == (net.first, None)
    net, found = asked(lambda n: ([n.first], [n.halve]))
    assert found == (net.first, net.halve)
    net, found = asked(lambda n: ([n.first, n.second], [n.halve, n.third]))
    assert found == ([net.first, net.second], [net.halve, net.third])


def test_lbfgs_equals_a_loop_written_by_hand():
    net = Net(lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=3))
    expected = copy.deepcopy(net)
    optimizer = expected.configure_optimizers()
    for batch in loader():

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = expected.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    fit(net)
    assert_equal(net, expected)


def test_a_closure_has_gradients_in_a_step_under_no_grad():
    class NoGrad(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            loss = closure()
            super().step()
            return loss

    net, expected = Net(lambda parameters: NoGrad(parameters, lr=0.1)), Net()
    expected.load_state_dict(net.state_dict())
    fit(net)
    fit(expected)
    assert_equal(net, expected)


def test_lbfgs_gives_the_end_of_an_epoch_one_output_a_batch():
    class Collects(Net):
        def training_epoch_end(self, outputs):
            self.outputs = outputs

    net = Collects(lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=3))
    fit(net)
    assert len(net.outputs) == len(loader())  # each batch's step evaluates its loss several times
    assert not any(output.requires_grad for output in net.outputs)


def test_lbfgs_skips_a_batch_without_a_loss():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 0 else self.loss(batch)

    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3)

    net, same = Skips(lbfgs), Net(lbfgs)
    same.load_state_dict(net.state_dict())
    fit(net)
    fit(same, list(loader())[1:])
    assert_equal(net, same)


def test_lbfgs_with_a_second_optimizer_is_refused():
    net = Configured(lambda n: [n.first, torch.optim.LBFGS(n.layers[2].parameters())])
    with pytest.raises(UsageError, match=r"LBFGS needs a closure .* Fix: return it alone"):
        fit(net)


class NoClosure(torch.optim.SGD):
    """A ``step`` with the signature that users' optimizers often have."""

    def step(self):
        return super().step()


def test_an_optimizer_whose_step_has_no_closure_argument():
    assert fit(Net(lambda parameters: NoClosure(parameters, lr=0.1))).global_step == 6


def test_an_overridden_zero_grad_is_called():
    class Keeps(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none=True):
            self.calls += 1  # and keeps the gradients, which add up

    kept = []

    def keeps(parameters):
        kept.append(Keeps(parameters, lr=0.1))
        return kept[-1]

    net = Net(keeps)
    expected = by_hand(net, loader(), keeps)
    fit(net)
    assert_equal(net, expected)
    assert kept[1].calls == 6


# --- steps of schedulers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "frequency", "options", "steps"),
    [
        ("epoch", 2, {}, 1),
        ("step", 4, {}, 4),
        ("step", 1, {"accumulate_grad_batches": 4}, 6),
        ("epoch", 1, {"max_epochs": -1, "max_steps": 12}, 2),
    ],
)
def test_interval_and_frequency(interval, frequency, options, steps):
    """Train three epochs of 6 batches."""
    net = Configured(scheduled(interval=interval, frequency=frequency))
    fit(net, **{"max_epochs": 3, **options})
    assert net.rates[0] == pytest.approx(0.5**steps)


# --- ReduceLROnPlateau ----------------------------------------------------------------------------


class Worse(Configured):
    """A metric that gets worse from the third epoch on."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(max(1, self.current_epoch)), on_step=True, on_epoch=True)


def test_plateau_follows_its_metric():
    net = Worse(on_plateau(monitor="val_loss_epoch"))
    fit(net, val=loader(), max_epochs=4)
    assert net.rates[0] == 0.5**3  # 1, 1, 2, 3: not better in three epochs of four


def test_plateau_follows_a_metric_of_training():
    class Trains(Configured):
        def training_step(self, batch, batch_idx):
            self.log("loss", 1.0, on_epoch=True)
            return super().training_step(batch, batch_idx)

    net = Trains(on_plateau(monitor="loss"))
    fit(net, max_epochs=3)
    assert net.rates[0] == 0.5**2


def test_plateau_waits_for_the_first_validation():
    net = Worse(on_plateau(monitor="val_loss_epoch"))
    fit(net, val=loader(), max_epochs=6, check_val_every_n_epoch=2)
    assert net.rates[0] == 0.5**2  # 1, 3, 5
    net = Worse(on_plateau(monitor="val_loss_epoch"))
    with pytest.raises(GeartrainError, match=r"not logged"):  # and never will be
        fit(net, val=loader(), max_epochs=6, check_val_every_n_epoch=7)


def test_plateau_whose_metric_is_missing_is_an_error_that_names_it():
    net = Configured(on_plateau(monitor="val_los"))
    with pytest.raises(GeartrainError, match=r"'val_los'.*not logged.*Did you mean 'val_loss'"):
        fit(net, val=loader())


@pytest.mark.parametrize(("flush", "frequency", "rate"), [(1, 3, 1), (50, 1, 0.5**3)])
def test_plateau_by_steps_judges_the_step(flush, frequency, rate):
    class Trains(Configured):
        def training_step(self, batch, batch_idx):
            self.log("loss", [5.0, 6.0, 4.0, 5.0, 6.0, 3.0][batch_idx])
            return super().training_step(batch, batch_idx)

    judges = {"monitor": "loss", "interval": "step", "frequency": frequency}
    net = Trains(on_plateau(**judges))
    fit(net, log_every_n_steps=flush)
    assert net.rates[0] == rate


@pytest.mark.parametrize("interval", [2, 1.0])
def test_plateau_by_steps_judges_each_validation_once(interval):
    """It is due after each step; validations come after every second one, or after each epoch."""
    epochs = 1 if interval == 2 else 3
    net = Configured(on_plateau(monitor="val", interval="step"))
    net.validation_step = lambda batch, batch_idx: net.log("val", 1.0)
    fit(net, val=loader(), val_check_interval=interval, max_epochs=epochs)
    assert net.rates[0] == 0.5**2  # 1, and twice no better


def test_plateau_judges_each_value_once():
    net = Configured(on_plateau(monitor="val"))
    net.validation_step = lambda batch, batch_idx: net.log("val", 1.0)
    fit(net, val=loader(), check_val_every_n_epoch=2, max_epochs=6)
    assert net.rates[0] == 0.5**2


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (0.5, [(3, 1), (6, 1 / 2), (9, 1 / 2), (12, 1 / 4)]),
        (4, [(4, 1), (10, 1 / 2)]),
    ],
)
def test_schedulers_of_epochs_step_before_the_validation_that_ends_one(interval, expected):
    seen = []
    net = Configured(lambda n: ([n.first], [n.halve]))
    net.on_validation_start = lambda: seen.append((net.global_step, net.rates[0]))
    fit(net, val=loader(), val_check_interval=interval, max_epochs=2)
    assert seen == expected
    assert net.rates[0] == 1 / 4


def test_plateau_that_is_not_strict_waits_for_its_metric_with_a_warning():
    net = Configured(on_plateau(monitor="val_los", strict=False))
    with pytest.warns(
        UserWarning, match=r"'val_los', which was not logged. Did you mean 'val_loss'"
    ):
        fit(net, val=loader(), max_epochs=3)
    assert net.rates[0] == 1


# --- estimated_stepping_batches -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 4),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 6),
        ({"max_epochs": -1, "max_steps": 5}, 5),
        ({"max_epochs": 1, "max_steps": 50}, 6),
    ],
)
def test_estimated_stepping_batches(options, expected):
    class Asks(Net):
        def configure_optimizers(self):
            self.asked = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    net = Asks()
    done = fit(net, **options)
    assert net.asked == expected == done.global_step
    assert isinstance(net.asked, int)  # as OneCycleLR needs it


@pytest.mark.parametrize(
    "options", [{"max_epochs": 2, "data": Stream(loader())}, {"max_epochs": -1}]
)
def test_estimated_stepping_batches_without_end(options):
    class Asks(Net):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == math.inf
            raise KeyError("asked")

    data = options.get("data", loader())
    with pytest.raises(KeyError, match="asked"):
        trainer(max_epochs=options["max_epochs"]).fit(Asks(), data)


def test_before_an_lbfgs_step_the_module_sees_gradients():
    net = Net(torch.optim.LBFGS)
    seen = []
    net.on_before_optimizer_step = lambda optimizer: seen.append(
        all(p.grad is not None for p in net.parameters())
    )
    fit(net, limit_train_batches=1)
    assert seen
    assert all(seen)


@pytest.mark.parametrize("loss", [torch.tensor(1.0, requires_grad=True), 1.0])
def test_a_closures_loss_is_the_mean_over_ranks_as_a_number_too(loss):
    hooks = SimpleNamespace(all_gather=lambda run, tensor: torch.stack([tensor, tensor + 2]))
    run = SimpleNamespace(device=torch.device("cpu"), hooks=hooks)
    assert SeveralRanks().mean_loss(run, loss).item() == 2.0
    assert SeveralRanks().mean_loss(run, None) is None
    assert RankCoordinator().mean_loss(run, loss) is loss
