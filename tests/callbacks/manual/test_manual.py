"""Manual optimisation in one process: training equals a plain loop; hooks; refusals.

On several ranks: tests/ddp/test_manual.py.
"""

import copy
import warnings
from functools import partial

import pytest
import torch
from small_models import (
    SGD,
    CountsInPlace,
    Loggers,
    Net,
    Noting,
    Recorder,
    assert_equal,
    differ,
    fit,
    loader,
    trainer,
    weights,
)
from torch import nn

from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import EMA, NaNGuard, Norms

from .manual import Two, by_hand, each_in_turn, in_turn_by_hand, once


class Own(Two):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


Own.automatic_optimization = True  # only __init__ sets it to False


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Two, Own], ids=["on the class", "in __init__"])
def test_manual_optimisation_trains_like_a_plain_loop(kind):
    module = kind()
    expected = by_hand(module, loader(), in_turn_by_hand, epochs=2)
    one = fit(module, max_epochs=2)
    assert_equal(module, expected)
    assert differ(module, kind().state_dict())
    assert (one.run.mode, one.global_step) == ("manual", 12)


def test_a_true_precision():
    module, data = Two(), [tuple(t.bfloat16() for t in batch) for batch in loader()]
    expected = by_hand(copy.deepcopy(module).bfloat16(), data, in_turn_by_hand)
    fit(module, precision="bf16-true")
    assert module.a.weight.dtype is torch.bfloat16
    torch.testing.assert_close(module.a.weight, expected.a.weight)


def test_the_hooks_of_a_model_that_was_wrapped_in_place_are_called():
    plugin = CountsInPlace()
    fit(Two(), plugins=[plugin])
    assert plugin.calls == {"training_step": 6}


def test_accumulation_over_two_backwards_and_over_batches():
    def train(module, batch, batch_idx):
        optimizer = module.optimizers()[0]
        module.manual_backward(module.loss(batch))
        module.manual_backward(module.loss(batch).square())
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    def same(module, optimizers, batch, batch_idx):
        module.loss(batch).backward()
        module.loss(batch).square().backward()
        if batch_idx % 3 == 2:
            optimizers[0].step()
            optimizers[0].zero_grad()

    module = Two(train)
    expected = by_hand(module, loader(), same)
    fit(module)
    assert_equal(module, expected)


@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [
        ("norm", lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-3)),
        ("value", lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3)),
    ],
)
def test_clip_gradients_clips_only_this_optimizers_gradients(algorithm, clip):
    norms = []

    def train(module, batch, batch_idx):
        for optimizer in module.optimizers():
            for one in module.optimizers():
                one.zero_grad()
            module.manual_backward(module.loss(batch))
            norms.append(module.clip_gradients(optimizer, 1e-3, algorithm))
            optimizer.step()

    module = Two(train)
    expected = by_hand(module, loader(), partial(in_turn_by_hand, clip=clip))
    fit(module)
    assert_equal(module, expected)
    assert [norm is None or norm > 1e-3 for norm in norms] == [True] * 12
    assert {norm is None for norm in norms} == {algorithm == "value"}


def test_options_of_backward():
    def train(module, batch, batch_idx):
        loss = module.loss(batch)
        module.manual_backward(loss, retain_graph=True)
        module.manual_backward(loss)
        both = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        module.manual_backward(torch.stack([module.loss(batch)] * 2), gradient=torch.ones(2))
        for p, expected in zip(module.parameters(), both, strict=True):
            torch.testing.assert_close(p.grad, expected)
        with pytest.raises(RuntimeError, match="second time"):
            module.manual_backward(loss)

    with pytest.warns(UserWarning, match="no optimizer was stepped"):
        fit(Two(train), limit_train_batches=1)


def test_a_closure():
    class Quasi(Two):
        def configure_optimizers(self):
            return [torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)], []

    losses, expected_losses = [], []

    def step(module, optimizer, batch, backward):
        def closure():
            optimizer.zero_grad()
            loss = module.loss(batch)
            backward(loss)
            return loss

        return optimizer.step(closure).item()

    def train(module, batch, batch_idx):
        losses.append(step(module, module.optimizers(), batch, module.manual_backward))

    def same(module, optimizers, batch, batch_idx):
        expected_losses.append(step(module, optimizers[0], batch, torch.Tensor.backward))

    module = Quasi(train)
    expected = by_hand(module, loader(), same)
    fit(module)
    assert_equal(module, expected)
    assert losses == expected_losses


def test_a_closure_keeps_autocast_and_a_step_does_not():
    seen = {}

    class Looks(torch.optim.SGD):
        def step(self, closure=None):
            seen["step"] = torch.is_autocast_enabled("cpu")
            return super().step(closure)

    class One(Two):
        def configure_optimizers(self):
            return Looks(self.parameters(), lr=0.1)

    def train(module, batch, batch_idx):
        def closure():
            seen["closure"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            loss = module.loss(batch)
            module.manual_backward(loss)
            return loss

        module.optimizers().step(closure)

    fit(One(train), precision="bf16-mixed")
    assert seen == {"step": False, "closure": (True, torch.bfloat16)}


# --- the optimizers -------------------------------------------------------------------------------


def test_optimizers_and_parameters_are_restored_after_an_error():
    def train(module, batch, batch_idx):
        module.kept = module.optimizers()[0]
        module.toggle_optimizer(module.kept)
        raise ValueError("mine")

    module = Two(train)
    with pytest.raises(ValueError, match="mine"):
        fit(module)
    assert not {"step", "zero_grad"} & set(vars(module.kept))
    assert all(p.requires_grad for p in module.parameters())


def test_an_optimizer_that_the_module_keeps_runs_the_hooks():
    recorder = Recorder()

    class Keeps(Two):
        def configure_optimizers(self):
            self.mine = torch.optim.SGD(self.parameters(), lr=0.1)
            return self.mine

    def train(module, batch, batch_idx):
        assert module.optimizers() is module.mine
        torch.optim.lr_scheduler.StepLR(module.mine, 1)
        module.mine.zero_grad()
        module.manual_backward(module.loss(batch))
        module.mine.step()

    module = Keeps(train)
    fit(module, plugins=[recorder], limit_train_batches=1)
    assert "optimizer_step 0" in recorder.calls
    assert not {"step", "zero_grad"} & set(vars(module.mine))


def test_only_the_module_steps_schedulers():
    notes = []

    class Scheduled(Two):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            by_steps = {"scheduler": Noting(optimizer, notes.append), "interval": "step"}
            return [optimizer], [Noting(optimizer, notes.append), by_steps]

    def train(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        optimizer.step()
        if batch_idx == 3:
            first, _ = module.lr_schedulers()
            first.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the scheduler must see that the optimizer stepped first
        fit(Scheduled(train), max_epochs=2)
    assert notes == ["scheduler", "scheduler"]


def test_an_epoch_without_a_step_causes_one_warning():
    with pytest.warns(UserWarning, match="no optimizer was stepped in the first epoch") as caught:
        fit(Two(lambda module, batch, batch_idx: None), max_epochs=3)
    assert sum("no optimizer was stepped" in str(one.message) for one in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(Two(), max_epochs=2)


def test_the_output_of_training_step_is_not_used_as_a_loss():
    outputs = []

    class Returns(Two):
        def training_step(self, batch, batch_idx):
            each_in_turn(self, batch, batch_idx)
            return [None, {"not a loss": 3}, "anything", 7][batch_idx % 4]

        def training_epoch_end(self, all_outputs):
            outputs.extend(all_outputs)

        def on_train_batch_end(self, output, batch, batch_idx):
            seen.append((output, batch_idx))

    seen = []
    fit(Returns())
    assert outputs == [None, {"not a loss": 3}, "anything", 7, None, {"not a loss": 3}]
    assert seen == list(zip(outputs, range(6), strict=True))


# --- hooks ----------------------------------------------------------------------------------------


def test_the_order_of_hooks():
    recorder = Recorder()

    class Notes(Two):
        pass

    names = ("train_batch_start", "before_backward", "after_backward", "before_optimizer_step")
    for name in (*names, "before_zero_grad", "train_batch_end"):
        setattr(Notes, f"on_{name}", lambda self, *arguments, name=name: recorder.note("own", name))
    fit(Notes(once), plugins=[recorder], limit_train_batches=1)
    assert recorder.calls == [
        "step 1",
        "own train_batch_start",
        "micro_step first last",
        "forward training_step 0",
        "own before_zero_grad",
        "own before_backward",
        "backward",
        "own after_backward",
        "reduce_gradients",
        "clip_gradients",
        "own before_optimizer_step",
        "optimizer_step 0",
        "own train_batch_end",
        "step done",
        "on_step_end 1",
    ]


def test_hooks_before_a_step_see_only_this_optimizer_and_once():
    seen = []

    class Looks:
        @hookimpl(wrapper=True)
        def reduce_gradients(self, run):
            yield
            seen.append(("reduce", [type(o).__name__ for o in run.optimizers]))

        @hookimpl(wrapper=True)
        def clip_gradients(self, run):
            norm = yield
            seen.append(("clip", norm is not None))
            return norm

    def train(module, batch, batch_idx):
        a, b = module.optimizers()
        module.manual_backward(module.loss(batch))
        module.clip_gradients(a, 1.0)
        a.step()
        b.step()
        assert module.optimizers() == [a, b]

    fit(Two(train), plugins=[Looks()], limit_train_batches=1)
    assert seen == [("reduce", ["SGD"]), ("clip", True), ("reduce", ["Adam"]), ("clip", False)]


def test_ema_averages_after_each_batch():
    module, average = Two(), EMA(decay=0.5)
    hand = copy.deepcopy(module)
    optimizers, _ = hand.configure_optimizers()
    expected = [p.detach().clone() for p in hand.parameters()]
    for batch_idx, batch in enumerate(loader()):
        in_turn_by_hand(hand, optimizers, batch, batch_idx)
        torch._foreach_lerp_(expected, [p.detach() for p in hand.parameters()], 0.5)
    fit(module, plugins=[average])
    for p, one in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), one)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_norms_are_of_the_stepped_optimizers_gradients_unscaled_and_before_clipping(precision):
    expected, logged = [], Loggers()

    def train(module, batch, batch_idx):
        a, _ = module.optimizers()
        module.manual_backward(module.loss(batch))
        scale = 65536 if precision == "16-mixed" else 1
        norms = [p.grad.norm() / scale for p in module.a.parameters()]
        expected.append(torch.stack(norms).norm().item())
        module.clip_gradients(a, 1e-6)
        a.step()  # b's gradients are still scaled

    options = {"log_every_n_steps": 1, "precision": precision, "limit_train_batches": 1}
    fit(Two(train), plugins=[Norms(every=1), logged], **options)
    norms = [metrics["grad_norm"] for _, metrics in logged.lines if "grad_norm" in metrics]
    assert norms == pytest.approx(expected)


@pytest.mark.parametrize("check", ["loss", "gradients"])
def test_nan_guard_skips_a_bad_step(check):
    def train(module, batch, batch_idx):
        module.optimizers()[0].zero_grad()
        module.manual_backward(module.loss(batch) * (float("nan") if batch_idx == 2 else 1.0))
        module.optimizers()[0].step()

    def same(module, optimizers, batch, batch_idx):
        if batch_idx != 2:
            optimizers[0].zero_grad()
            module.loss(batch).backward()
            optimizers[0].step()

    module = Two(train)
    expected = by_hand(module, loader(), same)
    one = fit(module, plugins=[NaNGuard("skip", check)])
    assert_equal(module, expected)
    assert one.callback_metrics["skipped_nan_steps"] == 1


def test_steps_are_batches_for_max_steps_and_flushes():
    logged = Loggers()

    def train(module, batch, batch_idx):
        each_in_turn(module, batch, batch_idx)
        module.log("batch", float(batch_idx))

    one = fit(Two(train), plugins=[logged], log_every_n_steps=2, max_steps=4, max_epochs=9)
    assert one.global_step == 4
    assert [step for step, metrics in logged.lines if "batch" in metrics] == [2, 4]


# --- toggling -------------------------------------------------------------------------------------


def test_toggling_does_not_change_frozen_and_shared_parameters():
    seen = []

    class Shares(Two):
        def __init__(self, train):
            super().__init__(train)
            self.shared, self.alone = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
            self.a.bias.requires_grad_(False)

        def configure_optimizers(self):
            return [
                torch.optim.SGD([*self.a.parameters(), self.shared], lr=0.1),
                torch.optim.SGD([*self.b.parameters(), self.shared], lr=0.1),
            ]

    def needs(module):
        return {name for name, p in module.named_parameters() if p.requires_grad}

    def train(module, batch, batch_idx):
        a, b = module.optimizers()
        for optimizer in (a, b):
            module.toggle_optimizer(optimizer)
            seen.append(needs(module))
            module.untoggle_optimizer(optimizer)
        seen.append(needs(module))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer steps
        fit(Shares(train), limit_train_batches=1)
    assert seen == [
        {"a.weight", "shared", "alone"},
        {"b.weight", "b.bias", "shared", "alone"},
        {"a.weight", "b.weight", "b.bias", "shared", "alone"},
    ]


def test_the_context_manager_untoggles_after_an_error():
    def train(module, batch, batch_idx):
        def raising():
            with module.toggled_optimizer(module.optimizers()[0]):
                assert not module.b.weight.requires_grad
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            raising()
        assert module.b.weight.requires_grad
        each_in_turn(module, batch, batch_idx)

    fit(Two(train))


# --- refused --------------------------------------------------------------------------------------


class Becomes(Two):
    """Changes ``automatic_optimization`` in setup."""

    def __init__(self, value):
        super().__init__()
        self.automatic_optimization, self.value = not value, value

    def setup(self, stage):
        self.automatic_optimization = self.value


def replaces(hook):
    """Return a plugin that replaces the hook."""
    members = {"replaces": {hook}, hook: hookimpl(lambda self, run: None)}
    return {"plugins": [type("Replaces", (), members)()]}


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (
            Two,
            {"accumulate_grad_batches": 4},
            r"Two\.automatic_optimization is False, so accumulate_grad_batches=4.*"
            r"Fix: call zero_grad\(\) and step\(\) once in 4",
        ),
        (Two, {"gradient_clip_val": 0.5}, r"val=0\.5.*self\.clip_gradients\(optimizer, 0\.5\)"),
        (
            Two,
            {"plugins": ["manual_optimisation"]},
            r"manual_optimisation\] is added to a run for a module with .* Fix: leave it out",
        ),
        (Two, replaces("step"), r"manual_optimisation\] must own the hook 'step'"),
        (Two, replaces("forward"), "must own the hook 'forward'"),
        (Two, replaces("clip_gradients"), "must own the hook 'clip_gradients'"),
        (partial(Becomes, True), {}, "automatic_optimization became True after fit had begun"),
        (partial(Becomes, False), {}, "automatic_optimization became False after fit had begun"),
    ],
)
def test_a_run_that_contradicts_manual_optimisation_is_refused(module, options, message):
    with pytest.raises(UsageError, match=message):
        fit(module(), **options)


def toggle_twice(module, a, b, loss):
    module.toggle_optimizer(a)
    module.toggle_optimizer(b)


def untoggle_another(module, a, b, loss):
    module.toggle_optimizer(a)
    module.untoggle_optimizer(b)


CLIP = "a number above 0, and 'norm' or 'value'"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (toggle_twice, "already toggled"),
        (untoggle_another, "another optimizer is toggled"),
        (lambda module, a, b, loss: module.untoggle_optimizer(a), "no optimizer is toggled"),
        (
            lambda module, a, b, loss: module.toggle_optimizer(SGD(module.parameters())),
            "none of this module's optimizers",
        ),
        (lambda module, a, b, loss: module.manual_backward(loss.detach()), "requires_grad=False"),
        (
            lambda module, a, b, loss: module.manual_backward(torch.stack([loss] * 2)),
            "must be one number",
        ),
        (lambda module, a, b, loss: module.manual_backward(3.0), "a tensor, but got float"),
        (lambda module, a, b, loss: module.clip_gradients(a, 0), CLIP),
        (lambda module, a, b, loss: module.clip_gradients(a, True), CLIP),
        (lambda module, a, b, loss: module.clip_gradients(a, "1"), CLIP),
        (lambda module, a, b, loss: module.clip_gradients(a, 1.0, "max"), CLIP),
        (lambda module, a, b, loss: a.step(scaler=3), "takes only a closure, not scaler"),
    ],
)
def test_a_wrong_call_in_a_training_step_is_an_error(act, message):
    def train(module, batch, batch_idx):
        act(module, *module.optimizers(), module.loss(batch))

    with pytest.raises((TrainingError, TypeError), match=message):
        fit(Two(train))


@pytest.mark.parametrize(
    "call",
    [
        lambda module, optimizer: module.manual_backward(torch.zeros(())),
        lambda module, optimizer: module.clip_gradients(optimizer, 1.0),
        lambda module, optimizer: module.toggle_optimizer(optimizer),
        lambda module, optimizer: module.untoggle_optimizer(optimizer),
    ],
)
def test_automatic_optimisation_refuses_the_methods_of_manual_optimisation(call):
    class Automatic(Net):
        def training_step(self, batch, batch_idx):
            call(self, self.optimizers())
            return self.loss(batch)

    message = r"Automatic calls self\..*automatic_optimization is True.*Fix"
    with pytest.raises(TrainingError, match=message):
        fit(Automatic())
    with pytest.raises(TrainingError, match="automatic_optimization is True"):
        call(Net(), None)
    with pytest.raises(TrainingError, match="only in fit"):
        call(Two(), None)


def test_options_that_a_plugins_backward_does_not_take_are_an_error():
    class Replaces:
        replaces = frozenset({"backward"})

        @hookimpl
        def backward(self, loss):
            loss.backward()

    def train(module, batch, batch_idx):
        module.manual_backward(module.loss(batch), retain_graph=True)

    fit(Two(), plugins=[Replaces()])
    message = r"Replaces owns the hook 'backward', which takes no retain_graph"
    with pytest.raises(TrainingError, match=message):
        fit(Two(train), plugins=[Replaces()])


# --- one trainer, several modules -----------------------------------------------------------------


def test_one_trainer_trains_manual_and_automatic_modules_and_evaluates_them():
    class Tested(Two):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", self.loss(batch))

    one, net, two = trainer(), Net(), Tested()
    before = weights(net), weights(two)
    one.fit(two, loader())
    assert one.hooks.owner("step").name == "manual_optimisation"
    one.test(two, loader())
    one.fit(net, loader())
    assert one.hooks.owner("step").name == "defaults"
    assert differ(net, before[0])
    assert differ(two, before[1])
