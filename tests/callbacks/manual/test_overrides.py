"""Methods of a module that replace a part of the training step."""

import copy
from functools import partial

import pytest
import torch
from small_models import SGD, EvalNet, Net, fit, loader, trainer
from threads import equal, on_threads

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import Callback, EarlyStopping


class Small(Net):
    """A ``Net`` whose gradients do not overflow at the first scale of 16-mixed."""

    def loss(self, batch):
        return super().loss(batch) * 1e-3


def made(base=Net, **methods):
    """Return a module with these methods and seeded weights."""
    torch.manual_seed(0)
    return type("Mine", (base,), methods)()


def trained(module=None, **options):
    """Return the weights after an epoch of 6 batches."""
    module = made() if module is None else module
    fit(module, **options)
    return copy.deepcopy(module.state_dict())


def two(self):
    """Two optimizers: of the first layer, and of the last."""
    return [SGD(self.layers[0].parameters()), SGD(self.layers[2].parameters())]


# --- each does what the loop does if it calls super() ---------------------------------------------

SUPER = {
    "backward": lambda self, loss: Net.backward(self, loss),
    "configure_gradient_clipping": lambda self, *given: Net.configure_gradient_clipping(
        self, *given
    ),
    "lr_scheduler_step": lambda self, *given: Net.lr_scheduler_step(self, *given),
    "optimizer_step": lambda self, *given: Net.optimizer_step(self, *given),
    "optimizer_zero_grad": lambda self, *given: Net.optimizer_zero_grad(self, *given),
}


CLIP = {"gradient_clip_val": 1e-4}


@pytest.mark.parametrize("name", SUPER)
@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 4}, {"precision": "16-mixed"}], ids=str
)
def test_super_is_what_the_loop_does(name, options):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    if (name, options.get("precision")) == ("optimizer_zero_grad", "16-mixed"):
        pytest.skip("refused")
    calls = []

    def method(self, *given):
        calls.append(name)
        SUPER[name](self, *given)

    scheduled, options = {"configure_optimizers": configure_optimizers}, {**CLIP, **options}
    expected = trained(made(Small, **scheduled), **options)
    assert equal(trained(made(Small, **scheduled, **{name: method}), **options), expected)
    steps = 6 if "accumulate_grad_batches" not in options else 2
    assert len(calls) == (6 if name == "backward" else steps)


# --- optimizer_step -------------------------------------------------------------------------------


def test_warm_up():
    rates = []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step(closure=optimizer_closure)

    assert not equal(trained(made(optimizer_step=optimizer_step)), trained())
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("output", [lambda loss: loss, lambda loss: {"loss": loss}])
def test_the_closure_returns_the_loss_and_computes_nothing(output):
    losses, seen, steps = [], [], []

    def training_step(self, batch, batch_idx):
        losses.append(self.loss(batch))
        return output(losses[-1])

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        def own():
            seen.append(optimizer_closure())
            return seen[-1]

        steps.append((epoch, batch_idx, optimizer.step(own)))

    trained(made(training_step=training_step, optimizer_step=optimizer_step), max_epochs=2)
    assert len(losses) == len(seen) == 12
    assert losses == seen
    assert not any(value.requires_grad for value in seen)
    expected = [(epoch, index) for epoch in (0, 1) for index in range(6)]
    assert steps == [(*place, value) for place, value in zip(expected, seen, strict=True)]


def test_the_batch_idx_of_an_accumulated_step_is_its_last():
    seen = []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        seen.append(batch_idx)

    trained(made(optimizer_step=optimizer_step), accumulate_grad_batches=4)
    assert seen == [3, 5]


@pytest.mark.parametrize(("precision", "skipped"), [("32", 0), ("16-mixed", 1)])
def test_one_of_two_optimizers_steps_every_second_batch(precision, skipped):
    """Its weights change in these batches only; a skipped step drops its gradients."""
    changed = []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        which = self.optimizers().index(optimizer)
        layer = self.layers[2 * which].weight
        before = layer.detach().clone()
        if which != skipped or batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        changed.append((which, not torch.equal(before, layer)))

    module = made(Small, configure_optimizers=two, optimizer_step=optimizer_step)
    one = trainer(precision=precision)
    one.fit(module, loader())
    assert one.callback_metrics.get("skipped_steps", 0) == 0
    assert [c for which, c in changed if which != skipped] == [True] * 6
    assert [c for which, c in changed if which == skipped] == [False, True] * 3


def test_schedulers_wait_for_a_step_that_is_skipped():
    stepped = []

    class Counts:
        def step(self):
            stepped.append(True)

    def configure_optimizers(self):
        schedule = {"scheduler": Counts(), "interval": "step"}
        return {"optimizer": SGD(self.parameters()), "lr_scheduler": schedule}

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx in (1, 4):
            optimizer.step(closure=optimizer_closure)

    trained(made(configure_optimizers=configure_optimizers, optimizer_step=optimizer_step))
    assert len(stepped) == 2


class Watches:
    """Wraps the step; the owner's result is its argument."""

    def __init__(self):
        self.results = []

    @hookimpl(wrapper=True)
    def optimizer_step(self):
        result = yield
        self.results.append(result)
        return result


def test_plugins_see_the_steps_that_are_taken():
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)

    watches = Watches()
    module = made(Small, optimizer_step=optimizer_step)
    trained(module, plugins=[watches], precision="16-mixed")
    assert watches.results == [True] * 3  # of the scaler


def test_lbfgs_computes_in_the_closure():
    losses = []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        losses.append(optimizer.step(closure=optimizer_closure))

    module, plain = made(optimizer_step=optimizer_step), made()
    module.make_optimizer = plain.make_optimizer = partial(torch.optim.LBFGS, max_iter=3)
    assert equal(trained(module), trained(plain))
    assert len(losses) == 6


@pytest.mark.parametrize("step", [lambda optimizer: None, lambda optimizer: optimizer.step()])
def test_lbfgs_without_its_closure(step):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        step(optimizer)

    module = made(optimizer_step=optimizer_step)
    module.make_optimizer = torch.optim.LBFGS
    with pytest.raises(TrainingError, match=r"Mine\.optimizer_step did not give LBFGS its closure"):
        fit(module)


def test_a_scheduler_in_optimizer_step_does_not_warn(recwarn):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.schedule.step()

    trained(made(configure_optimizers=configure_optimizers, optimizer_step=optimizer_step))
    assert not [str(one.message) for one in recwarn if "lr_scheduler" in str(one.message)]


def test_the_optimizer_has_its_own_methods_after_the_run():
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if batch_idx == 2:
            raise ZeroDivisionError

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()

    module = made(optimizer_step=optimizer_step, optimizer_zero_grad=optimizer_zero_grad)
    optimizer = SGD(module.parameters())
    module.make_optimizer = lambda parameters: optimizer
    with pytest.raises(ZeroDivisionError):
        fit(module)
    assert {"step", "zero_grad"}.isdisjoint(vars(optimizer))


# --- the others -----------------------------------------------------------------------------------


def test_clipping_of_one_optimizer():
    norms = []

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        if optimizer is self.optimizers()[1]:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_before_optimizer_step(self, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))

    methods = {"configure_gradient_clipping": configure_gradient_clipping}
    methods |= {"configure_optimizers": two, "on_before_optimizer_step": on_before_optimizer_step}
    trained(made(**methods), gradient_clip_val=1e-3)
    assert max(norms[1::2]) <= 1.001e-3 < min(norms[::2])


def test_clip_gradients_without_a_limit_does_nothing_and_a_wrong_one_is_refused():
    assert equal(trained(made(configure_gradient_clipping=SUPER["configure_gradient_clipping"])),
                 trained())  # fmt: skip
    wrong = made(configure_gradient_clipping=lambda self, o, v, a: self.clip_gradients(o, -1))
    with pytest.raises(TrainingError, match="give a number above 0"):
        fit(wrong)
    elsewhere = made(on_after_backward=lambda self: self.clip_gradients(self.optimizers(), 1.0))
    with pytest.raises(TrainingError, match="Fix: call it in configure_gradient_clipping"):
        fit(elsewhere)


def test_backward_in_manual_optimisation():
    options = []

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch), retain_graph=True)

    def backward(self, loss, *args, **kwargs):
        options.append(kwargs)
        loss.backward(*args, **kwargs)

    for precision in ("32", "16-mixed"):
        module = made(training_step=training_step, backward=backward, automatic_optimization=False)
        fit(module, precision=precision, limit_train_batches=1)
    assert options == [{"retain_graph": True}] * 2


def test_zero_grad_every_second_batch_accumulates():
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)

    module = made(optimizer_zero_grad=optimizer_zero_grad, optimizer_step=optimizer_step)
    module.make_optimizer = partial(torch.optim.SGD, lr=0.05)  # gradients are summed, not averaged
    for name, value in trained(module).items():
        torch.testing.assert_close(value, trained(accumulate_grad_batches=2)[name])


def test_lr_scheduler_step_gets_the_metric_of_a_plateau():
    seen = []

    class Timm:
        """A scheduler whose step needs the epoch, as timm's."""

        def step(self, epoch, metric=None):
            seen.append((epoch, metric))

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch, metric=metric)

    def configure_optimizers(self):
        plateau = {"scheduler": Timm(), "monitor": "val_loss", "reduce_on_plateau": True}
        return [SGD(self.parameters())], [Timm(), plateau]

    module = made(EvalNet, lr_scheduler_step=lr_scheduler_step,
                  configure_optimizers=configure_optimizers)  # fmt: skip
    one = fit(module, val=loader(), max_epochs=2)
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1]
    assert [metric is None for _, metric in seen] == [True, False] * 2
    assert seen[-1][1] == one.callback_metrics["val_loss"]


# --- on ranks -------------------------------------------------------------------------------------


def test_on_ranks_every_rank_has_the_same_weights():
    """Each override gets averaged gradients; a step that all ranks skip changes nothing."""

    class Over(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 3:
                optimizer.step(closure=optimizer_closure)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, algorithm):
            self.clip_gradients(optimizer, gradient_clip_val, algorithm)

        def backward(self, loss):
            loss.backward(retain_graph=True)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad()

    torch.manual_seed(0)
    alone, first = Over(), Over()
    first.load_state_dict(alone.state_dict())
    options = {"gradient_clip_val": 0.01, "max_epochs": 1}
    trainer(**options).fit(alone, loader(24, 4))
    one, strategy = on_threads(**options)
    one.fit(first, loader(24, 2))
    ranks = [run.module.state_dict() for run in strategy.runs]
    assert equal(ranks[0], ranks[1])
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(ranks[0][name], value)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "options", "words"),
    [
        (
            {"optimizer_step": lambda self, epoch, batch_idx, optimizer, optimizer_idx=0,
             optimizer_closure=None: None},
            {},
            r"Mine.optimizer_step takes .*Fix: def optimizer_step\(self, epoch, batch_idx, "
            r"optimizer, optimizer_closure\)",
        ),
        ({"lr_scheduler_step": lambda self, scheduler, idx, metric: None}, {}, "Fix: def lr_sch"),
        ({"backward": lambda self: None}, {}, r"Fix: def backward\(self, loss\)"),
        ({"optimizer_steps": lambda self: None}, {}, "Did you mean 'optimizer_step'"),
        ({"optimizer_zero_grad": lambda self, e, b, o: None}, {"precision": "16-mixed"}, "twice"),
        (
            {"optimizer_step": lambda self, e, b, o, c: None, "automatic_optimization": False},
            {},
            "Mine.optimizer_step would never be called: automatic_optimization is False. Fix: do",
        ),
        ({"configure_callbacks": lambda self: [3]}, {}, "callbacks=3: it is no callback"),
    ],
)  # fmt: skip
def test_methods_that_cannot_work(methods, options, words):
    with pytest.raises(UsageError, match=words):
        trainer(**options).check(made(**methods))


@pytest.mark.parametrize(
    ("name", "hook"), [("backward", "backward"), ("configure_gradient_clipping", "clip_gradients")]
)
def test_a_strategy_that_owns_the_hook(name, hook):
    def owns(self, run): ...

    owner = type("Sharded", (gt.strategies.SingleDeviceStrategy,), {hook: hookimpl(owns)})()
    with pytest.raises(UsageError, match=rf"Mine\.{name}.*must own the hook '{hook}', and Sharded"):
        trainer(strategy=owner).check(made(**{name: SUPER[name]}))


# --- configure_callbacks --------------------------------------------------------------------------


class Notes(Callback):
    def __init__(self, name):
        self.name, self.calls = name, 0

    def on_train_start(self, trainer, pl_module):
        self.calls += 1


class Others(Notes):
    pass


def test_configure_callbacks_replaces_callbacks_of_the_same_class():
    given, other, own = Notes("given"), Others("other"), Notes("own")
    module = made(configure_callbacks=lambda self: own)
    one = trainer(callbacks=[given, other])
    one.fit(module, loader())
    one.fit(module, loader())  # again the same object
    assert (given.calls, other.calls, own.calls) == (0, 2, 2)
    assert [info.name for info in one.plan.plugins] == ["Others", "Notes"]


def test_configure_callbacks_on_ranks():
    def configure_callbacks(self):
        return [EarlyStopping("val_loss", patience=0, min_delta=9.0)]

    one, strategy = on_threads(max_epochs=5)
    one.fit(made(EvalNet, configure_callbacks=configure_callbacks), loader(), loader())
    assert [run.epoch for run in strategy.runs] == [2, 2]
