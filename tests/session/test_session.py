"""Session: a user's loop trains like Trainer and like a loop in plain torch; refusals."""

import copy
import inspect
import json
import pickle

import pytest
import torch
from small_models import (
    CountsInPlace,
    Loggers,
    Net,
    Pretend,
    Recorder,
    assert_equal,
    by_hand,
    differ,
    loader,
    samples,
    trainer as make_trainer,
    weights,
)
from torch import nn
from torch.nn import functional

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import EMA, EarlyStopping


def make(**options):
    return gt.Session(**{"accelerator": "cpu", **options})


def layers():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def train(session, module, batches, optimizer=None, accumulate=1, epochs=1):
    """Run a typical user's loop with a Session; return for each step if it was taken."""
    made = (
        torch.optim.SGD(module.parameters(), lr=0.1)
        if optimizer is None
        else optimizer(module.parameters())
    )
    model, stepper = session.setup(module, made)
    batches, taken = session.setup_dataloaders(batches), []
    for _ in range(epochs):
        for i, batch in enumerate(batches, start=1):
            with session.no_backward_sync(model, enabled=i % accumulate != 0):
                session.backward(loss_of(model, batch) / accumulate)
            if i % accumulate == 0:
                taken.append(session.step(stepper))
                stepper.zero_grad()
    return taken


# --- the same weights -----------------------------------------------------------------------------

CASES = {
    "sgd": {},
    "accumulating": {"accumulate_grad_batches": 3},
    "clipped by norm": {"gradient_clip_val": 0.05},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed, clipped": {"precision": "16-mixed", "gradient_clip_val": 0.05},
}


@pytest.mark.parametrize("name", CASES)
def test_a_loop_trains_like_a_trainer(name):
    options = dict(CASES[name])
    theirs, ours = Net(), Net()
    ours.load_state_dict(theirs.state_dict())
    before = weights(ours)
    make_trainer(max_epochs=2, **options).fit(theirs, loader())
    accumulate = options.pop("accumulate_grad_batches", 1)
    with make(**options) as session:
        train(session, ours.layers, loader(), accumulate=accumulate, epochs=2)
    assert_equal(ours.layers, theirs.layers)
    assert differ({k: v.float() for k, v in ours.state_dict().items()}, before)


def test_a_loop_trains_like_a_loop_in_plain_torch():
    module = Net()
    expected = by_hand(module, list(loader()), torch.optim.AdamW, epochs=2)
    with make() as session:
        train(session, module, loader(), torch.optim.AdamW, epochs=2)
    assert_equal(module, expected)


def test_lbfgs_computes_in_a_closure():
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    by_trainer, by_session, by_torch = Net(lbfgs), Net(lbfgs), Net(lbfgs)
    for module in (by_session, by_torch):
        module.load_state_dict(by_trainer.state_dict())
    make_trainer().fit(by_trainer, loader())
    stepper = lbfgs(by_torch.parameters())
    returned = []
    for batch in loader():

        def closure(batch=batch):
            stepper.zero_grad()
            loss = by_torch.loss(batch)
            loss.backward()
            return loss

        returned.append(stepper.step(closure).item())
    with make() as session:
        model, optimizer = session.setup(by_session, lbfgs(by_session.parameters()))
        for batch in session.setup_dataloaders(loader()):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                session.backward(loss)
                return loss

            assert optimizer.step(closure).item() == returned.pop(0)
        with pytest.raises(
            UsageError, match=r"LBFGS needs a closure. Fix: optimizer.step\(closure\)"
        ):
            optimizer.step()
    assert_equal(by_session, by_trainer)
    assert_equal(by_session, by_torch)


def test_a_closure_of_an_optimizer_that_needs_none_is_called_once():
    module, calls = layers(), []
    with make(precision="16-mixed") as session:
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        before = weights(module)

        def closure():
            calls.append(1)
            loss = loss_of(model, next(iter(loader())))
            session.backward(loss)
            return loss

        with torch.no_grad():
            assert optimizer.step(closure).item() > 0
    assert calls == [1]
    assert differ(module, before)


def test_two_models_take_turns_as_in_plain_torch():
    """A small GAN: each loss uses both models, each optimizer steps one."""

    def play(make_parts, step):
        one, two, optimizer_one, optimizer_two, backward = make_parts
        for x, y in loader():
            optimizer_two.zero_grad()
            backward(functional.mse_loss(two(one(x).detach()), y))
            step(optimizer_two)
            optimizer_one.zero_grad()
            backward(two(one(x)).square().mean())
            step(optimizer_one)

    def parts():
        torch.manual_seed(5)
        one, two = nn.Linear(3, 3), nn.Linear(3, 1)
        return (
            one,
            two,
            torch.optim.Adam(one.parameters(), lr=0.1),
            torch.optim.SGD(two.parameters(), lr=0.1),
        )

    expected = parts()
    play((*expected, torch.Tensor.backward), lambda optimizer: optimizer.step())
    ours = parts()
    with make() as session:
        one, optimizer_one = session.setup(ours[0], ours[2])
        two, optimizer_two = session.setup(ours[1], ours[3])
        play((one, two, optimizer_one, optimizer_two, session.backward), session.step)
        assert session.global_step == 12
        assert {name for name, _ in session.run.module.named_children()} == {"model0", "model1"}
    assert_equal(ours[0], expected[0])
    assert_equal(ours[1], expected[1])


def test_a_trainers_module_is_called_through_its_own_step():
    theirs, ours, lines = Net(), Net(), Loggers()
    ours.load_state_dict(theirs.state_dict())
    make_trainer().fit(theirs, loader())
    calls = Recorder()
    calls.step = calls.micro_step = None
    ours.training_step = lambda batch, batch_idx: (
        ours.log("loss", loss := ours.loss(batch)),
        loss,
    )[1]
    with make(plugins=[lines], log_every_n_steps=2) as session:
        model, optimizer = session.setup(ours, ours.configure_optimizers())
        assert (ours.device, ours.global_rank, ours.trainer) == (torch.device("cpu"), 0, session)
        for i, batch in enumerate(session.setup_dataloaders(loader())):
            optimizer.zero_grad()
            session.backward(model.training_step(batch, i))
            optimizer.step()
    assert_equal(ours, theirs)
    assert [step for step, metrics in lines.lines if "loss" in metrics] == [2, 4, 6]
    assert ours._run is None


@pytest.mark.parametrize(
    ("automatic", "method"),
    [(True, "optimizers"), (False, "manual_backward"), (True, "toggle_optimizer")],
)
def test_a_module_that_steps_its_optimizers_is_an_error(automatic, method):
    class Manual(Net):
        automatic_optimization = automatic

        def training_step(self, batch, batch_idx):
            getattr(self, method)(*([] if method == "optimizers" else [None]))

    with make() as session:
        model = session.setup(Manual())
        with pytest.raises(
            TrainingError,
            match=rf"Manual calls self.{method}, and in a Session .*. Fix: session.backward",
        ):
            model.training_step(samples(), 0)


def test_hooks_of_a_module_that_a_session_never_calls_are_named():
    class Hooked(Net):
        def on_train_start(self): ...

    with (
        make() as session,
        pytest.warns(UserWarning, match=r"Hooked.on_train_start: a Session never calls it"),
    ):
        session.setup(Hooked())


# --- hooks ----------------------------------------------------------------------------------------


class Watcher:
    """A plugin that wraps the hooks of a step and records their order and their runs."""

    def __init__(self):
        self.calls, self.runs = [], []

    def note(self, what, run):
        self.calls.append(what)
        self.runs.append(
            (run.step, [type(o).__name__ for o in run.optimizers], type(run.module).__name__)
        )

    @hookimpl
    def on_run_start(self, run):
        self.note("on_run_start", run)

    @hookimpl(wrapper=True)
    def forward(self, run, method):
        self.note(f"forward {method}", run)
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self, run):
        self.note("backward", run)
        return (yield)

    @hookimpl(wrapper=True)
    def reduce_gradients(self, run):
        yield
        self.note("reduce_gradients", run)
        run.log("grad", torch.nn.utils.get_total_norm([p.grad for p in run.module.parameters()]))

    @hookimpl(wrapper=True)
    def clip_gradients(self, run):
        self.note("clip_gradients", run)
        return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        self.note("optimizer_step", run)
        return (yield)

    @hookimpl
    def on_step_end(self, run):
        self.note("on_step_end", run)

    @hookimpl
    def on_run_end(self, run):
        self.note("on_run_end", run)

    @hookimpl
    def on_exception(self, run, error):
        self.note(f"on_exception {error}", run)

    @hookimpl(wrapper=True)
    def teardown_device(self, run):
        self.note("teardown_device", run)
        return (yield)


STEP = [
    "forward forward",
    "backward",
    "reduce_gradients",
    "clip_gradients",
    "optimizer_step",
    "on_step_end",
]


def test_the_hooks_are_called_in_the_order_of_a_step():
    watcher, module = Watcher(), layers()
    with make(plugins=[watcher]) as session:
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        assert watcher.calls == []
        for batch in loader(8):
            session.backward(loss_of(model, batch))
            optimizer.step()
    assert watcher.calls == ["on_run_start", *STEP, *STEP, "on_run_end", "teardown_device"]
    assert watcher.runs[3] == (0, ["SGD"], "Sequential")
    assert watcher.runs[-3] == (2, ["SGD"], "Sequential")


def test_metrics_that_a_plugin_logs_in_a_step_reach_the_loggers():
    module, lines = layers(), Loggers()
    with make(plugins=[Watcher(), lines], log_every_n_steps=1) as session:
        train(session, module, loader(8))
    assert [(step, set(metrics)) for step, metrics in lines.lines] == [(1, {"grad"}), (2, {"grad"})]


def test_norms_are_of_the_optimizer_that_steps_and_unscaled():
    module, lines, expected = layers(), Loggers(), []
    made = [torch.optim.SGD(module[i].parameters(), lr=0.0) for i in (0, 2)]
    loss_of(module, next(iter(loader()))).backward()
    expected = [
        torch.nn.utils.get_total_norm([p.grad for p in module[i].parameters()]).item()
        for i in (0, 2)
    ]
    module.zero_grad()
    with make(precision="16-mixed", plugins=["norms", lines], log_every_n_steps=1) as session:
        model, *steppers = session.setup(module, *made)
        session.backward(loss_of(model, next(iter(loader()))))
        for stepper in steppers:
            stepper.step()
    assert [metrics["grad_norm"] for _, metrics in lines.lines] == pytest.approx(expected, rel=1e-2)


def test_gradients_are_reduced_once_if_the_loop_clips_them():
    watcher, module = Watcher(), layers()
    with make(plugins=[watcher], precision="16-mixed") as session:
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for batch in loader(8):
            optimizer.zero_grad()
            session.backward(loss_of(model, batch))
            norm = session.clip_gradients(model, optimizer, max_norm=0.01)
            clipped = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
            assert clipped.item() == pytest.approx(0.01, rel=1e-3)
            assert norm > 0.01
            optimizer.step()
    assert watcher.calls.count("reduce_gradients") == 2


@pytest.mark.parametrize("clips", [False, True])
def test_a_skipped_step_does_not_change_another_optimizers_of_the_same_backward(clips):
    module, plain = layers(), layers()
    loss_of(plain, next(iter(loader()))).backward()
    with make(precision="16-mixed") as session:
        model, first, second = session.setup(
            module, *(torch.optim.SGD(module[i].parameters(), lr=1.0) for i in (0, 2))
        )
        session.backward(loss_of(model, next(iter(loader()))))
        module[0].weight.grad[0, 0] = torch.inf
        if clips:
            for optimizer in (first, second):
                session.clip_gradients(model, optimizer, clip_val=1e6)
        assert [session.step(first), session.step(second)] == [False, True]
        assert_equal(module[0], layers()[0])
        for name, parameter in module[2].named_parameters():
            step = layers()[2].get_parameter(name) - parameter
            expected = plain[2].get_parameter(name).grad
            torch.testing.assert_close(step, expected, rtol=5e-2, atol=1e-3)  # float16
        first.zero_grad()
        second.zero_grad()
        session.backward(loss_of(model, next(iter(loader()))))
        assert [session.step(first), session.step(second)] == [True, True]


@pytest.mark.parametrize(
    ("precision", "how"), [("32-true", {"max_norm": 1e-3}), ("16-mixed", {"clip_val": 1e-4})]
)
def test_clipping_by_hand_leaves_another_optimizers_gradients_alone(precision, how):
    module = layers()
    made = [torch.optim.SGD(module[i].parameters(), lr=0.0) for i in (0, 2)]
    with make(precision=precision) as session:
        model, first, second = session.setup(module, *made)
        session.backward(loss_of(model, next(iter(loader()))))
        before = [p.grad.clone() for p in module[2].parameters()]
        norm = session.clip_gradients(model, first, **how)
        assert all(
            torch.equal(p.grad, old) for p, old in zip(module[2].parameters(), before, strict=True)
        )
        assert all(p.grad.abs().max() <= 1.001e-3 for p in module[0].parameters())
        first.step()
        second.step()
    module.zero_grad()
    loss_of(module, next(iter(loader()))).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in module[0].parameters()])
    assert norm is None or norm.item() == pytest.approx(expected.item(), rel=1e-2)


def test_clipping_by_hand_by_value_and_wrong_calls():
    module = layers()
    with make() as session:
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        session.backward(loss_of(model, next(iter(loader()))))
        assert session.clip_gradients(model, optimizer, clip_val=0.001) is None
        assert max(p.grad.abs().max().item() for p in module.parameters()) == pytest.approx(0.001)
        with pytest.raises(UsageError, match="either clip_val= or max_norm="):
            session.clip_gradients(model, optimizer)
        with pytest.raises(UsageError, match=r"no optimizer that session.setup returned"):
            session.clip_gradients(model, torch.optim.SGD(module.parameters()), max_norm=1.0)
        session.backward(loss_of(model, next(iter(loader()))))
        with pytest.raises(TrainingError, match="between clip_gradients and step"):
            optimizer.step()


def test_a_skipped_step_is_reported():
    module, lines = layers(), Loggers()
    with make(precision="16-mixed", plugins=[lines]) as session:
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        before = weights(module)
        session.backward(loss_of(model, next(iter(loader()))) * 1e6)
        assert session.step(optimizer) is False
        assert_equal(module, before)
        optimizer.zero_grad()
        session.backward(loss_of(model, next(iter(loader()))) * 1e-3)
        assert session.step(optimizer) is True
        assert differ(module, before)
    assert lines.lines[-1][1] == {"skipped_steps": 1.0}


def test_after_an_error_on_exception_fires_and_the_device_is_released():
    watcher = Watcher()

    def work():
        with make(plugins=[watcher]) as session:
            session.setup(layers())
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        work()
    assert watcher.calls == ["on_exception mine", "teardown_device"]


@pytest.mark.parametrize("hook", ["on_epoch_start", "on_validation_end", "step", "micro_step"])
def test_a_plugin_with_a_hook_that_is_never_called_is_refused(hook):
    argument = {"step": "micro_batches", "micro_step": "first"}.get(hook, "run")
    namespace = {"hookimpl": hookimpl}
    body = "        return (yield)" if hook in ("step", "micro_step") else "        pass"
    mark = "@hookimpl(wrapper=True)" if hook in ("step", "micro_step") else "@hookimpl"
    exec(f"class Waits:\n    {mark}\n    def {hook}(self, {argument}):\n{body}", namespace)
    with pytest.raises(
        UsageError, match=f"Waits: a Session never calls {hook}: .* Fix: .*geartrain.Trainer"
    ):
        make(plugins=[namespace["Waits"]()])


def test_geartrains_plugins_for_a_trainer_are_refused_by_name():
    with pytest.raises(
        UsageError,
        match=r"geartrain-callbacks\[early_stopping\]: a Session never calls on_epoch_end, on_val",
    ):
        make(plugins=[EarlyStopping("val_loss")])
    with pytest.raises(UsageError, match=r"ema.*never calls on_validation_start"):
        make(callbacks=[EMA()])


def test_a_plugin_with_errors_are_warnings_causes_a_warning():
    class Monitor:
        errors_are_warnings = True

        @hookimpl
        def on_epoch_end(self): ...

        @hookimpl
        def on_step_end(self): ...

    with pytest.warns(UserWarning, match="Monitor: a Session never calls on_epoch_end"):
        make(plugins=[Monitor()])


def test_a_plugin_whose_missing_hooks_are_optional_causes_a_warning():
    with pytest.warns(
        UserWarning,
        match=r"geartrain-monitor\[device_stats\]: a Session never calls on_epoch_end, on_val",
    ):
        make(plugins=["device_stats"])

    class Monitor:
        @hookimpl(optionalhook=True)
        def on_epoch_end(self): ...

        @hookimpl
        def on_validation_end(self): ...

    with pytest.raises(UsageError, match="Monitor: a Session never calls"):
        make(plugins=[Monitor()])


def test_a_strategy_that_owns_the_step_is_refused():
    class Graphs:
        @hookimpl
        def plan_processes(self):
            return gt.Layout(1, 1)

        @hookimpl
        def step(self, run, micro_batches): ...

    with pytest.raises(UsageError, match="Graphs: a Session never calls step"):
        make(strategy=Graphs(), devices=1)


# --- models, optimizers, loaders ------------------------------------------------------------------


def test_a_session_model_has_the_attributes_and_state_of_the_model():
    module = layers()
    module.temperature = 1.0
    with make() as session:
        model = session.setup(module)
        assert isinstance(model, nn.Module)
        assert not isinstance(model, tuple)
        assert model.state_dict().keys() == module.state_dict().keys()
        model.temperature = 2.0
        assert module.temperature == 2.0
        assert (
            model[0] is module[0]
            if hasattr(type(model), "__getitem__")
            else model.get_submodule("0") is not None
        )
        model.eval()
        assert not module.training
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert type(copied) is type(pickled) is nn.Sequential
        assert copied[0].weight is not module[0].weight
        model.load_state_dict({key: value + 1 for key, value in module.state_dict().items()})
        x = torch.ones(2, 3)
        assert torch.equal(model(x), module(x))
    assert torch.equal(model(x), module(x))  # closed: the plain model


def test_a_marked_method_is_called_through_the_hook():
    watcher, module = Watcher(), Net()
    batch = next(iter(loader()))
    with make(plugins=[watcher]) as session:
        model = session.setup(module)
        model.loss(batch)
        assert watcher.calls == []
        model.mark_forward_method("loss")
        model.mark_forward_method(module.forward)
        assert torch.equal(model.loss(batch), module.loss(batch))
        assert watcher.calls == ["on_run_start", "forward loss"]
        with pytest.raises(UsageError, match="Net has no method 'los'"):
            model.mark_forward_method("los")


def test_the_hooks_of_a_model_that_was_wrapped_in_place_are_called():
    plugin = CountsInPlace()
    with make(plugins=[plugin]) as session:
        train(session, layers(), loader())
    assert plugin.calls == {"forward": 6}


def test_keyword_arguments_reach_the_model():
    class Scaled(nn.Linear):
        def forward(self, x, *, scale=1.0):
            return super().forward(x) * scale

    module = Scaled(3, 1)
    with make() as session:
        model, x = session.setup(module), torch.ones(2, 3)
        assert torch.equal(model(x, scale=3.0), module(x, scale=3.0))


def test_outputs_under_autocast_are_of_32_bits():
    seen = []
    module = layers()
    module[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with make(precision="bf16-mixed") as session:
        model = session.setup(module)
        assert model(torch.ones(2, 3)).dtype is torch.float32
        with session.autocast():
            model(torch.ones(2, 3))
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_autocast_of_a_true_precision_is_its_type():
    with make(precision="64-true") as session, session.autocast():
        assert torch.zeros(1).dtype is torch.float64
    with make() as session, session.autocast():
        assert torch.zeros(1).dtype is torch.float32


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_sees_the_steps(when, recwarn):
    module = layers()
    made = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5) if when == "before" else None
    with make() as session:
        model, optimizer = session.setup(module, made)
        assert isinstance(optimizer, torch.optim.SGD)
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        before = weights(module)
        for batch in loader(8):
            session.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
        assert session.global_step == 2
        assert optimizer.param_groups[0]["lr"] == made.param_groups[0]["lr"] == 0.025
        assert differ(module, before)
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_an_optimizers_state_is_shared_with_the_one_that_was_set_up():
    module = layers()
    made = torch.optim.Adam(module.parameters())
    with make() as session:
        model, optimizer = session.setup(module, made)
        session.backward(loss_of(model, next(iter(loader()))))
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        session.backward(loss_of(model, next(iter(loader()))))
        optimizer.step()
        optimizer.load_state_dict(state)
        assert made.state_dict()["state"][0]["step"] == 1
        optimizer.step()
        assert made.state_dict()["state"][0]["step"] == 2
        assert session.global_step == 3


def test_optimizers_can_be_set_up_apart():
    module = layers()
    with make() as session:
        with pytest.raises(UsageError, match="before setup of the model"):
            session.setup_optimizers(torch.optim.SGD(module.parameters()))
        model, other = session.setup_module(module), session.setup(nn.Linear(2, 2))
        optimizer = session.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.1))
        before = weights(module)
        session.backward(loss_of(model, next(iter(loader()))))
        assert session.step(optimizer)
        assert differ(module, before)
        assert other is not model
        with pytest.raises(UsageError, match="steps parameters that Linear does not have"):
            session.setup_optimizers(torch.optim.SGD(layers().parameters()))


def test_wrong_setups():
    module = layers()
    with make() as session:
        with pytest.raises(
            UsageError,
            match=r"SGD steps parameters that Linear does not have. Fix: create it from model\.",
        ):
            session.setup(nn.Linear(3, 1), torch.optim.SGD(module.parameters()))
        with pytest.raises(UsageError, match="the arguments after the model are not optimizers"):
            session.setup(module, [torch.optim.SGD(module.parameters())])
        with pytest.raises(UsageError, match="the first argument is no model"):
            session.setup(torch.optim.SGD(module.parameters()))
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters()))
        for again in (module, model):
            with pytest.raises(UsageError, match="this Sequential is already set up"):
                session.setup(again)
        with pytest.raises(UsageError, match="this SGD is already set up"):
            session.setup_optimizers(optimizer)
        with (
            pytest.raises(UsageError, match=r"give the model that session.setup returned"),
            session.no_backward_sync(module),
        ):
            pass
    with pytest.raises(UsageError, match="the session is closed"):
        optimizer.step()


def test_loaders_shuffle_in_each_pass():
    random = loader(shuffle=True)
    random.sampler.epochs = []
    random.sampler.set_epoch = random.sampler.epochs.append
    with make() as session:
        one, two = session.setup_dataloaders(random, loader(8))
        assert (len(one), len(two)) == (6, 2)
        assert one.dataset is random.dataset
        passes = [torch.cat([x for x, _ in one]) for _ in range(2)]
        assert random.sampler.epochs == [0, 1]
        with pytest.raises(UsageError, match="a DataLoader or an iterable of batches, once"):
            session.setup_dataloaders(one)
    assert not torch.equal(*passes)


def test_batches_and_to_device_are_of_the_precisions_type():
    with make(precision="64-true") as session:
        (batch,) = session.setup_dataloaders([samples()[:2]])
        assert (
            [t.dtype for t in batch]
            == [t.dtype for t in session.to_device(samples()[:2])]
            == [torch.float64] * 2
        )
        (left,) = session.setup_dataloaders([samples()[:2]], move_to_device=False)
        assert left[0].dtype is torch.float32
        assert session.to_device(module := nn.Linear(2, 2)) is module


# --- launch and close -----------------------------------------------------------------------------


def test_launch_with_a_function_runs_it_and_closes():
    watcher = Watcher()
    session = make(plugins=[watcher], seed=4)

    def work(inner, number, plus=0):
        assert inner is session
        module = nn.Linear(3, 1)
        train(inner, module, loader(8))
        return module.weight.detach().clone(), number + plus, inner.world_size

    one = session.launch(work, 3, plus=2)
    assert one[1:] == (5, 1)
    assert watcher.calls[-2:] == ["on_run_end", "teardown_device"]
    assert torch.equal(session.launch(work, 0)[0], one[0])  # each launch seeds
    with pytest.raises(ZeroDivisionError):
        session.launch(lambda session: 1 / 0)
    assert watcher.calls[-2:] == ["on_exception division by zero", "teardown_device"]


def test_wrong_launches():
    with make() as session:
        with pytest.raises(UsageError, match="the argument is no function"):
            session.launch(3)
        session.launch()
        with pytest.raises(UsageError, match="already launched"):
            session.launch()
    session.close()


def test_several_processes_must_be_launched():
    session = make(strategy=Pretend(), devices=2)
    for use in (
        lambda: session.setup(layers()),
        lambda: session.backward(None),
        lambda: session.barrier(),
        lambda: session.device,
    ):
        with pytest.raises(
            UsageError,
            match=r"before session.launch\(\), and Pretend has 2 processes. Fix: first call ses",
        ):
            use()
    assert (session.world_size, session.global_rank) == (2, 0)
    with session:
        session.launch()
        assert (session.global_rank, session.local_rank, session.node_rank, session.world_size) == (
            0,
            0,
            0,
            2,
        )
        assert session.is_global_zero


def test_a_strategy_that_starts_on_a_function_needs_one():
    class Elsewhere:
        needs_function = True

        @hookimpl
        def plan_processes(self):
            return gt.Layout(1, 1)

        @hookimpl
        def launch(self):
            """Call the worker in another process."""

    with pytest.raises(
        UsageError,
        match=r"Elsewhere starts its processes on a function. Fix: session.launch\(train\)",
    ):
        make(strategy=Elsewhere(), devices=1).launch()
    Elsewhere.needs_function = False
    with pytest.raises(UsageError, match="Elsewhere runs in other processes than this one"):
        make(strategy=Elsewhere(), devices=1).launch()


def test_on_several_ranks_a_step_needs_a_call_of_the_session_s_model():
    """One of two ranks, simulated: the test checks only the loop."""
    module = layers()
    with make(strategy=Pretend(), devices=2) as session:
        session.launch()
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        batch = next(iter(loader()))
        session.backward(loss_of(module, batch))
        with pytest.raises(
            TrainingError,
            match=r"Sequential was not called through the model that session.setup returned",
        ):
            optimizer.step()
        with session.no_backward_sync(model):
            session.backward(loss_of(model, batch))
        with pytest.raises(TrainingError, match="outside of no_backward_sync"):
            optimizer.step()
        session.backward(loss_of(model, batch))
        optimizer.step()


def test_the_seed_is_set_when_the_session_is_made():
    make(seed=7)
    drawn = torch.rand(3)
    assert make().seed_everything(7) == 7
    assert torch.equal(torch.rand(3), drawn)


def test_a_session_can_be_pickled(tmp_path):
    session = make(
        plugins=["csv"],
        plugin_options={"csv": {"path": str(tmp_path / "metrics.csv")}},
        precision="16-mixed",
        gradient_clip_val=1.0,
    )
    same = pickle.loads(pickle.dumps(session))
    assert same.plan == session.plan
    with same:
        module = layers()
        assert train(same, module, loader(8)) is not None
    assert same.plan.options.gradient_clip_val == 1.0


# --- files ----------------------------------------------------------------------------------------


def test_the_folder_has_the_logged_metrics(tmp_path):
    module, lines = layers(), Loggers()
    with make(output=tmp_path / "run", plugins=[lines]) as session:
        session.log("early", 1)
        train(session, module, loader(8))
        session.log_dict({"loss": torch.tensor([2.5]), "bad": float("nan")})
        session.log("late", 3, step=70, sync_dist=True)
        with pytest.raises(TrainingError, match="a metric is one number"):
            session.log("wrong", torch.ones(2))
        with pytest.raises(TrainingError, match="has a control character"):
            session.log("\x1b[2J", 1)
    written = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [
        (line["step"], line.get("loss"), line.get("bad"), line.get("late"), line.get("early"))
        for line in written
    ] == [
        (0, None, None, None, 1.0),
        (2, 2.5, "nan", None, None),
        (70, None, None, 3.0, None),
    ]
    assert [step for step, _ in lines.lines] == [0, 2, 70]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["metrics"]["loss"]) == ("done", 2, 2.5)
    with pytest.raises(UsageError, match="already contains a run"):
        make(output=tmp_path / "run")


class Made(gt.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(3, width)


@pytest.mark.parametrize(
    ("widths", "expected"), [([5], {"width": 5}), ([5, 6], {"model0.width": 5, "model2.width": 6})]
)
def test_hyperparameters_of_its_modules_are_in_the_plan(tmp_path, widths, expected):
    seen = []

    class Looks:
        @hookimpl
        def on_run_start(self, run):
            seen.append(run.plan.hyperparameters)

    session = make(output=tmp_path / "run", plugins=[Looks()])
    with session:
        for i, width in enumerate(widths):
            if i:
                session.setup(nn.Linear(1, 1))
            session.setup(Made(width))
        session.log("x", 1)
        assert session.plan.hyperparameters == session.run.plan.hyperparameters == expected
    assert seen == [expected]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["hyperparameters"] == expected


def test_a_checkpoint_is_read_in_place(tmp_path):
    saved = []

    class Hears:
        @hookimpl
        def on_checkpoint_saved(self, path):
            saved.append(path)

    def parts(session):
        module = nn.Linear(3, 1)
        return session.setup(module, torch.optim.Adam(module.parameters()))

    path = tmp_path / "deep" / "state.ckpt"
    with make(plugins=[Hears()]) as session:
        model, optimizer = parts(session)
        session.backward(loss_of(model, next(iter(loader()))))
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "epoch": 3, "best": {"loss": 0.5}}
        session.save(path, state)
        assert saved == [path]
        other, its = parts(session)
        into = {"model": other, "optimizer": its, "epoch": 0}
        assert session.load(path, into) == {"best": {"loss": 0.5}}
        assert into["epoch"] == 3
        assert_equal(other.module, model.module)
        assert its.state_dict()["state"][0]["step"] == 1
        assert session.load(path)["epoch"] == 3
        assert set(torch.load(path, weights_only=True)["model"]) == {"weight", "bias"}


def test_wrong_checkpoints(tmp_path):
    with make() as session:
        model = session.setup(nn.Linear(3, 1))
        with pytest.raises(UsageError, match="'made' is object, which has no state_dict"):
            session.save(tmp_path / "a", {"made": object()})
        with pytest.raises(UsageError, match="a dict of names, not Linear"):
            session.save(tmp_path / "a", model.module)
        session.save(tmp_path / "a", {"model": model, "epoch": 1})
        with pytest.raises(
            TrainingError, match=r"has no 'net', 'step'; it has 'model', 'epoch'. Fix: strict=False"
        ):
            session.load(tmp_path / "a", {"net": model, "epoch": 0, "step": 1})
        assert session.load(tmp_path / "a", {"step": 1}, strict=False).keys() == {"model", "epoch"}
        with pytest.raises(
            TrainingError, match=r"'model' does not fit Linear: (?s:.*)size mismatch"
        ):
            session.load(tmp_path / "a", {"model": nn.Linear(2, 1)})
        with pytest.raises(UsageError, match="there is no checkpoint"):
            session.load(tmp_path / "b")
        torch.save([1], tmp_path / "c")
        with pytest.raises(TrainingError, match="not a checkpoint of a session: it holds list"):
            session.load(tmp_path / "c")


def test_collectives_of_one_process():
    with make() as session:
        data = {"a": torch.arange(3.0), "b": [torch.tensor(2)]}
        gathered = session.all_gather(data)
        assert gathered["a"].shape == (1, 3)
        for op in ("mean", "sum", "min", "max"):
            assert torch.equal(session.all_reduce(data, op)["a"], data["a"])
        assert session.all_reduce(1.5).item() == 1.5
        assert session.all_gather(1.5).tolist() == [1.5]
        with pytest.raises(UsageError, match="one of mean, sum, min, max"):
            session.all_reduce(data, "median")
        assert session.broadcast({"x": 1}) == {"x": 1}
        session.barrier()
        with session.rank_zero_first(), session.rank_zero_first(local=True):
            pass


def test_print_is_rank_zeros(capsys):
    with make() as session:
        session.print("here", end="!")
    assert capsys.readouterr().out == "here!"


def test_callbacks_are_called_by_name():
    class Mine:
        def __init__(self):
            self.heard = []

        def on_train_epoch_end(self, epoch, model=None):
            self.heard.append((epoch, model))

    mine = Mine()
    with make(callbacks=[mine]) as session:
        session.call("on_train_epoch_end", 1, model="m")
        session.call("on_nothing")
    assert mine.heard == [(1, "m")]
    with (
        pytest.warns(UserWarning, match="no method of this session's callbacks was called"),
        make(callbacks=mine) as session,
    ):
        session.launch()


def test_should_stop_follows_a_plugin_s_request():
    class Stops:
        @hookimpl
        def on_step_end(self, run):
            run.should_stop = True

    with make(plugins=[Stops()], log_every_n_steps=2) as session:
        module = layers()
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        stops = []
        for batch in loader():
            session.backward(loss_of(model, batch))
            optimizer.step()
            stops.append(session.should_stop)
    assert stops == [False, True, True, True, True, True]


def test_a_session_has_fabrics_name_and_arguments():
    assert gt.Fabric is gt.Session
    known = inspect.signature(gt.Session).parameters
    assert list(known)[:7] == [
        "accelerator",
        "strategy",
        "devices",
        "num_nodes",
        "precision",
        "plugins",
        "callbacks",
    ]


def test_unknown_arguments_are_errors():
    with pytest.raises(UsageError, match=r"no argument 'loggers'. Write: plugins="):
        make(loggers=[])
    with pytest.raises(
        UsageError, match="no argument 'max_epochs', which belongs to a Trainer's loop"
    ):
        make(max_epochs=3)
    with pytest.raises(UsageError, match=r"no argument 'precison'. Did you mean 'precision'"):
        make(precison="64-true")


def test_16_mixed_refuses_gradients_that_bypass_its_scaler():
    with make(precision="16-mixed") as session:
        module = layers()
        model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        loss_of(model, next(iter(loader()))).backward()
        with pytest.raises(
            TrainingError,
            match=r"no session.backward since the last step.* Fix: session.backward\(loss\)",
        ):
            optimizer.step()
        with pytest.raises(UsageError, match="weight is float16, but weights stay in float32"):
            session.setup(nn.Linear(3, 1).half())


@pytest.mark.parametrize("data", [{"a": [torch.ones(2)]}, "ab", 3])
def test_an_object_that_is_no_loader_is_refused(data):
    with (
        make() as session,
        pytest.raises(
            UsageError,
            match=rf"setup_dataloaders\({type(data).__name__}\): .*is no loader.*Fix: give a Data",
        ),
    ):
        session.setup_dataloaders(data)
