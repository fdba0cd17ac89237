"""EMA: an exponential moving average of the weights."""

import pytest
import torch
from torch import nn

from geartrain import UsageError, hookimpl
from geartrain.callbacks import EMA

from ..models import SGD, EvalNet, Net, assert_equal, differ, fit, loader, trainer, weights


class Follows:
    """Keeps the weights after each step, and computes the average by hand."""

    def __init__(self):
        self.weights = []

    @hookimpl
    def on_run_start(self, run):
        self.first = weights(run.module)

    @hookimpl
    def on_step_end(self, run):
        self.weights.append(weights(run.module))

    def average(self, decay, steps=None, first=None):
        found = {name: t.double() for name, t in (self.first if first is None else first).items()}
        for now in self.weights if steps is None else [self.weights[i - 1] for i in steps]:
            found = {name: decay * t + (1 - decay) * now[name].double() for name, t in found.items()}
        return found


def close(a, b, tolerance=1e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name].double(), b[name].double(), rtol=tolerance, atol=tolerance, msg=name)


class Norm(EvalNet):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def averaged(ema, module=None, **options):
    module, follows = Net() if module is None else module, Follows()
    one = fit(module, plugins=[follows, ema], **{"max_epochs": 2, **options})
    return module, follows, one


def test_the_module_holds_the_average_at_the_end():
    module, follows, _ = averaged(EMA(0.9))
    close(module.state_dict(), follows.average(0.9))
    assert differ(module, follows.weights[-1])


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 9, 12]), (5, [5, 10])])
def test_every(every, steps):
    ema = EMA(0.8, every=every)
    module, follows, _ = averaged(ema)
    close(module.state_dict(), follows.average(0.8, steps))
    assert ema.updates == len(steps)


def test_it_begins_at_start_step_with_the_weights_as_they_are():
    module, follows, _ = averaged(EMA(0.8, start_step=5))
    close(module.state_dict(), follows.average(0.8, range(6, 13), follows.weights[4]))


def test_a_start_that_never_comes_leaves_the_weights():
    module, follows, _ = averaged(EMA(0.8, start_step=100))
    assert_equal(module, follows.weights[-1])


@pytest.mark.parametrize(("decay", "which"), [(0.0, -1), (1.0, None)])
def test_the_ends_of_decay(decay, which):
    module, follows, _ = averaged(EMA(decay))
    assert_equal(module, follows.first if which is None else follows.weights[which])


def test_floating_buffers_are_averaged_and_the_others_are_not():
    module, follows, _ = averaged(EMA(0.9), Norm())
    expected = follows.average(0.9)
    counted = "layers.1.num_batches_tracked"
    expected[counted] = follows.weights[-1][counted]
    close(module.state_dict(), expected)


class Watches:
    """Keeps the weights that are validated."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def forward(self, run, method):
        if method == "validation_step":
            self.seen.append((run.stage, weights(run.module)))
        return (yield)


@pytest.mark.parametrize("validate", [True, False])
def test_validation_is_of_the_average_and_training_goes_on_with_the_weights(validate):
    torch.manual_seed(3)
    plain, before = EvalNet(), Follows()
    fit(plain, plugins=[before], max_epochs=2)
    torch.manual_seed(3)
    watches = Watches()
    ema, module, follows = EMA(0.9, validate=validate), EvalNet(), Follows()
    fit(module, val=loader(4), plugins=[watches, follows, ema], max_epochs=2, num_sanity_val_steps=1)
    assert_equal(before.weights[-1], follows.weights[-1])  # what is trained is the same as without
    (stage, sanity), (_, first), (_, second) = watches.seen
    assert stage == "sanity_check"
    assert_equal(sanity, follows.first)
    if validate:
        close(first, follows.average(0.9, range(1, 7)))
        close(second, follows.average(0.9))
    else:
        assert_equal(first, follows.weights[5])


def test_last_ckpt_has_the_trained_weights_and_what_is_tested_is_the_average(tmp_path):
    watches, follows, module = Watches(), Follows(), EvalNet()
    one = trainer(plugins=[watches, follows, EMA(0.9)], output=tmp_path / "run")
    one.fit(module, loader())
    assert_equal(torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["model"], follows.weights[-1])
    average = weights(module)
    one.validate(module, loader(4))
    assert_equal(watches.seen[0][1], average)
    assert_equal(module, average)


def test_a_validation_that_fails_leaves_the_trained_weights():
    class Fails(EvalNet):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

    follows, module = Follows(), Fails()
    with pytest.raises(ZeroDivisionError):
        fit(module, val=loader(), plugins=[follows, EMA(0.9)])
    assert_equal(module, follows.weights[-1])


def test_bf16_weights_are_averaged_in_float32():
    """At a decay of 0.999 an average in bfloat16 would not move at all."""
    ema = EMA(0.999)
    module, follows, _ = averaged(ema, Net(), precision="bf16-true")
    average = ema.state_dict()["average"]
    assert {t.dtype for t in average.values()} == {torch.float32}
    close(average, follows.average(0.999), 1e-5)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_its_state_goes_on_averaging():
    ema, follows = EMA(0.9), Follows()
    module = Net()
    fit(module, plugins=[follows, ema])
    trained, again, more = follows.weights[-1], EMA(0.9), Follows()
    again.load_state_dict(ema.state_dict())
    module.load_state_dict(trained)
    fit(module, plugins=[more, again])
    close(module.state_dict(), more.average(0.9, first=follows.average(0.9)))
    assert again.updates == 12


def test_without_a_state_the_next_fit_begins_anew():
    ema = EMA(0.9)
    averaged(ema)
    module, follows, _ = averaged(ema, Net())
    close(module.state_dict(), follows.average(0.9))


def test_a_state_of_another_module_is_refused():
    ema, again = EMA(0.9), EMA(0.9)
    averaged(ema, Norm())
    again.load_state_dict(ema.state_dict())
    with pytest.raises(UsageError, match=r"geartrain\[ema\]: its state is of another module"):
        averaged(again, Net(SGD))


@pytest.mark.parametrize("wrong", [{"decay": 1.1}, {"decay": -0.1}, {"every": 0}, {"start_step": -1}])
def test_wrong_options(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        EMA(**wrong)
