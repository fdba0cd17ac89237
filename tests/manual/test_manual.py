"""Manual optimisation in one process: training equals a plain loop; hooks; refusals.

On several ranks: tests/ddp/test_manual.py.
"""

import copy
import warnings
from functools import partial

import pytest
import torch
from small_models import (
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
from geartrain.callbacks import EMA, Callback, NaNGuard, Norms

from .manual import Two, by_hand, each_in_turn, in_turn_by_hand, once


class Own(Two):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


Own.automatic_optimization = True  # only __init__ sets it to False


def test_the_mode_of_a_run_is_manual_or_automatic():
    assert [fit(module).run.mode for module in (Own(), Net())] == ["manual", "automatic"]


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Two, Own], ids=["on the class", "in __init__"])
def test_manual_optimisation_trains_like_a_plain_loop(kind):
    module = kind()
    expected = by_hand(module, loader(), in_turn_by_hand, epochs=2)
    one = fit(module, max_epochs=2)
    assert_equal(module, expected)
    assert differ(module, kind().state_dict())
    assert one.global_step == 12


@pytest.mark.parametrize(
    ("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)]
)
def test_true_precisions(precision, dtype):
    module = Two()
    fit(module, precision=precision, max_epochs=2)
    assert module.a.weight.dtype is dtype
    torch.manual_seed(0)
    expected = Two().to(dtype)
    data = [tuple(t.to(dtype) for t in batch) for batch in loader()]
    torch.testing.assert_close(
        module.a.weight, by_hand(expected, data, in_turn_by_hand, epochs=2).a.weight
    )


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
    assert (
        all(norm is None for norm in norms)
        if algorithm == "value"
        else all(norm > 1e-3 for norm in norms)
    )


def test_options_of_backward():
    def train(module, batch, batch_idx):
        loss = module.loss(batch)
        module.manual_backward(loss, retain_graph=True)
        module.manual_backward(loss)
        both = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        module.manual_backward(
            torch.stack([loss.detach() * 0 + module.loss(batch)] * 2), gradient=torch.ones(2)
        )
        for p, expected in zip(module.parameters(), both, strict=True):
            torch.testing.assert_close(p.grad, expected)
        with pytest.raises(RuntimeError, match="second time"):
            module.manual_backward(loss)

    with pytest.warns(UserWarning, match="no optimizer was stepped"):
        fit(Two(train), limit_train_batches=1)


def test_a_closure():
    class Quasi(Two):
        def configure_optimizers(self):
            return [
                torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3),
                torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
            ], []

    returned = []

    def train(module, batch, batch_idx):
        optimizer = module.optimizers()[0]

        def closure():
            optimizer.zero_grad()
            loss = module.loss(batch)
            module.manual_backward(loss)
            return loss

        returned.append((optimizer.step(closure).item(), batch))

    def same(module, optimizers, batch, batch_idx):
        def closure():
            optimizers[0].zero_grad()
            loss = module.loss(batch)
            loss.backward()
            return loss

        expected_returns.append(optimizers[0].step(closure).item())

    expected_returns = []
    module = Quasi(train)
    expected = by_hand(module, loader(), same)
    fit(module)
    assert_equal(module, expected)
    assert [loss for loss, _ in returned] == expected_returns


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


def test_optimizers_are_torchs_and_are_restored_after_the_run():
    def train(module, batch, batch_idx):
        a, b = module.optimizers()
        assert isinstance(a, torch.optim.SGD)
        assert isinstance(b, torch.optim.Adam)
        assert a is module.kept
        torch.optim.lr_scheduler.StepLR(a, 1)
        each_in_turn(module, batch, batch_idx)

    class Keeps(Two):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            self.kept = made[0][0]
            return made

    module = Keeps(train)
    fit(module)
    assert not {"step", "zero_grad"} & set(vars(module.kept))


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
        module.mine.zero_grad()
        module.manual_backward(module.loss(batch))
        module.mine.step()

    fit(Keeps(train), plugins=[recorder], limit_train_batches=1)
    assert "optimizer_step 0" in recorder.calls


def test_only_the_module_steps_schedulers():
    notes = []

    class Scheduled(Two):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = Noting(optimizer, notes.append)
            return [optimizer], [
                scheduler,
                {"scheduler": Noting(optimizer, notes.append), "interval": "step"},
            ]

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

    for name in (
        "train_batch_start",
        "before_backward",
        "after_backward",
        "before_optimizer_step",
        "before_zero_grad",
        "train_batch_end",
    ):
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
        expected.append(
            torch.stack([p.grad.norm() / scale for p in module.a.parameters()]).norm().item()
        )
        module.clip_gradients(a, 1e-6)
        a.step()  # b's gradients are still scaled

    fit(
        Two(train),
        plugins=[Norms(every=1), logged],
        log_every_n_steps=1,
        precision=precision,
        limit_train_batches=1,
    )
    assert [
        metrics["grad_norm"] for _, metrics in logged.lines if "grad_norm" in metrics
    ] == pytest.approx(expected)


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


def test_a_callback_gets_every_step():
    seen = []

    class Hears(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen.append(type(optimizer).__name__)

    fit(Two(), callbacks=[Hears()], limit_train_batches=2)
    assert seen == ["SGD", "Adam"] * 2


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


def test_unbalanced_toggles_are_errors():
    def twice(module, batch, batch_idx):
        a, b = module.optimizers()
        module.toggle_optimizer(a)
        module.toggle_optimizer(b)

    def another(module, batch, batch_idx):
        a, b = module.optimizers()
        module.toggle_optimizer(a)
        module.untoggle_optimizer(b)

    def never(module, batch, batch_idx):
        module.untoggle_optimizer(module.optimizers()[0])

    def strange(module, batch, batch_idx):
        module.toggle_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))

    for train, words in (
        (twice, "already toggled"),
        (another, "another optimizer is toggled"),
        (never, "no optimizer is toggled"),
    ):
        with pytest.raises(TrainingError, match=words):
            fit(Two(train))
    with pytest.raises(TrainingError, match="none of this module's optimizers"):
        fit(Two(strange))


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"accumulate_grad_batches": 4},
            r"Two\.automatic_optimization is False, so accumulate_grad_batches=4.*"
            r"Fix: call zero_grad\(\) and step\(\) once in 4",
        ),
        (
            {"gradient_clip_val": 0.5},
            r"gradient_clip_val=0\.5.*self\.clip_gradients\(optimizer, 0\.5\)",
        ),
    ],
)
def test_options_that_the_loop_would_ignore_are_errors(options, words):
    with pytest.raises(UsageError, match=words):
        trainer(**options).fit(Two(), loader())


def test_manual_optimisation_cannot_be_selected_by_name():
    with pytest.raises(
        UsageError,
        match=r"manual_optimisation\] is added to a run for a module with .* Fix: leave it out",
    ):
        trainer(plugins=["manual_optimisation"])


@pytest.mark.parametrize("hook", ["step", "forward", "clip_gradients"])
def test_plugins_that_replace_a_hook_of_manual_optimisation_are_refused(hook):
    replaces = {"replaces": {hook}, hook: hookimpl(lambda self, run: None)}
    with pytest.raises(UsageError, match=rf"manual_optimisation\] must own the hook '{hook}'"):
        trainer(plugins=[type("Replaces", (), replaces)()]).fit(Two(), loader())


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

    with pytest.raises(
        TrainingError, match=r"Automatic calls self\..*automatic_optimization is True.*Fix"
    ):
        fit(Automatic())
    with pytest.raises(TrainingError, match="automatic_optimization is True"):
        call(Net(), None)
    with pytest.raises(TrainingError, match="only in fit"):
        call(Two(), None)


@pytest.mark.parametrize("value", [True, False])
def test_automatic_optimization_cannot_change_during_fit(value):
    class Changes(Two):
        automatic_optimization = value

        def setup(self, stage):
            self.automatic_optimization = not value

    with pytest.raises(
        UsageError, match=rf"automatic_optimization became {not value} after fit had begun"
    ):
        fit(Changes())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda module, batch: module.loss(batch).detach(), "requires_grad=False"),
        (lambda module, batch: torch.stack([module.loss(batch)] * 2), "must be one number"),
        (lambda module, batch: 3.0, "a tensor, but got float"),
    ],
)
def test_a_loss_without_backward(loss, words):
    with pytest.raises(TrainingError, match=words):
        fit(Two(lambda module, batch, batch_idx: module.manual_backward(loss(module, batch))))


def test_options_that_a_plugins_backward_does_not_take_are_an_error():
    class Replaces:
        replaces = frozenset({"backward"})

        @hookimpl
        def backward(self, loss):
            loss.backward()

    fit(Two(), plugins=[Replaces()])
    with pytest.raises(
        TrainingError, match=r"Replaces owns the hook 'backward', which takes no retain_graph"
    ):
        fit(
            Two(
                lambda module, batch, _: module.manual_backward(
                    module.loss(batch), retain_graph=True
                )
            ),
            plugins=[Replaces()],
        )


@pytest.mark.parametrize(
    ("limit", "algorithm"), [(0, "norm"), (True, "norm"), ("1", "norm"), (1.0, "max")]
)
def test_wrong_clipping(limit, algorithm):
    with pytest.raises(TrainingError, match="a number above 0, and 'norm' or 'value'"):
        fit(
            Two(
                lambda module, batch, _: module.clip_gradients(
                    module.optimizers()[0], limit, algorithm
                )
            )
        )


def test_a_step_takes_only_a_closure():
    with pytest.raises(TypeError, match="takes only a closure, not scaler"):
        fit(Two(lambda module, batch, _: module.optimizers()[0].step(scaler=3)))


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
