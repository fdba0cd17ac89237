"""The loop: its results, its end, and the order of its calls."""

import math
import warnings
from functools import partial

import pytest
import torch
from pluggy import HookCaller
from small_models import (
    SGD,
    EvalNet,
    Net,
    Noting,
    Own,
    Recorder,
    Stream,
    assert_equal,
    by_hand,
    fit,
    loader,
    trainer,
    weights,
)

from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import Callback
from geartrain.testing import run_plugin

# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.Adam, lr=0.01)])
def test_weights_equal_those_of_a_loop_written_by_hand(optimizer):
    net = Net(optimizer)
    expected = by_hand(net, loader(), optimizer, epochs=2)
    fit(net, max_epochs=2)
    assert_equal(net, expected)


# --- how long -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({"max_epochs": 0}, 0, 0),
        ({"max_epochs": None, "max_steps": 8}, 8, None),
        ({"max_epochs": -1, "max_steps": 12}, 12, 2),
        ({"max_epochs": 5, "max_steps": 0}, 0, 0),
        ({"max_epochs": 1, "max_steps": 100}, 6, 1),
        ({"max_epochs": 2, "limit_train_batches": 100}, 12, 2),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 6, 2),
        ({"max_epochs": 2, "limit_train_batches": 1.0}, 12, 2),
        ({"max_epochs": 2, "limit_train_batches": 1}, 2, 2),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 4, 2),
        ({"max_epochs": 9, "max_steps": 3, "accumulate_grad_batches": 2}, 3, None),
    ],
)
def test_length(options, steps, epochs):
    done = fit(**options)  # 6 batches an epoch
    assert done.global_step == done.run.step == steps
    assert epochs is None or done.current_epoch == done.run.epoch == epochs


class Stopper:
    """Sets should_stop in one step."""

    def __init__(self, step):
        self.step = step

    @hookimpl
    def on_step_end(self, run):
        if run.step == self.step:
            run.trainer.should_stop = True


@pytest.mark.parametrize(
    ("asked_in", "flush_every", "stops_after"),
    [(1, 4, 1), (4, 4, 4), (5, 4, 5), (7, 50, 7)],
    ids=["before a flush", "at a flush", "before the epoch's end", "in the second epoch"],
)
def test_should_stop_takes_effect_after_the_step_in_one_process(asked_in, flush_every, stops_after):
    done = fit(plugins=[Stopper(asked_in)], log_every_n_steps=flush_every, max_epochs=5)
    assert done.global_step == stops_after
    assert done.should_stop


def test_a_second_fit_forgets_that_the_first_should_stop():
    stopper = Stopper(1)
    one = trainer(plugins=[stopper], log_every_n_steps=1)
    one.fit(Net(), loader())
    assert one.global_step == 1
    stopper.step = None
    one.fit(Net(), loader())
    assert one.global_step == 6


@pytest.mark.parametrize(
    ("least", "stops_after"),
    [
        ({"min_epochs": 3}, 18),
        ({"min_steps": 9}, 9),
        ({"min_steps": 8, "min_epochs": 2}, 12),
        ({"min_steps": 20, "max_epochs": 2}, 12),
        ({"min_epochs": 2, "max_steps": 7}, 7),
        ({"min_steps": 4, "accumulate_grad_batches": 2}, 4),
    ],
)
def test_should_stop_waits_for_the_least_training_with_a_warning(least, stops_after):
    """Epochs have 6 batches. The stop is requested in step 2, and each step flushes."""
    options = {"max_epochs": 9, **least}
    with pytest.warns(UserWarning, match="should_stop waits for min_epochs="):
        done = fit(plugins=[Stopper(2)], log_every_n_steps=1, **options)
    assert done.global_step == stops_after


@pytest.mark.filterwarnings("ignore:should_stop waits")
def test_a_resumed_run_waits_for_the_same_training(tmp_path):
    fit(output=tmp_path / "run", max_epochs=1)
    one = trainer(plugins=[Stopper(7)], log_every_n_steps=1, max_epochs=9, min_steps=10)
    one.fit(Net(), loader(), ckpt_path=tmp_path / "run" / "last.ckpt")
    assert one.global_step == 10


# --- loaders without length -----------------------------------------------------------------------


def test_a_loader_without_length_runs_until_it_is_exhausted():
    assert fit(train=Stream(loader()), max_epochs=2).num_training_batches == math.inf
    assert fit(train=Stream(loader()), max_epochs=2).global_step == 12


def endless():
    while True:
        yield from loader()


class Endless:
    def __iter__(self):
        return endless()


@pytest.mark.parametrize(
    "make", [Endless, endless], ids=["a new iterator an epoch", "one generator over all epochs"]
)
def test_a_limit_ends_the_epoch_of_an_endless_loader(make):
    assert fit(train=make(), limit_train_batches=7, max_epochs=2).global_step == 14


@pytest.mark.parametrize("empty", [[], Stream([])], ids=["list", "no length"])
def test_an_empty_loader_is_an_error(empty):
    with pytest.raises(TrainingError, match=r"empty|no batch"):
        fit(train=empty)


def test_no_loader_is_an_error_that_names_the_method():
    with pytest.raises(UsageError, match="train_dataloader"):
        trainer().fit(Net())


# --- results of training_step ---------------------------------------------------------------------


class Returning(Net):
    """Returns ``what(loss, batch_idx)``."""

    def __init__(self, what, **options):
        super().__init__(**options)
        self.what = what

    def training_step(self, batch, batch_idx):
        return self.what(self.loss(batch), batch_idx)


def test_a_none_loss_skips_the_batch():
    net = Returning(lambda loss, batch_idx: None if batch_idx in (0, 3) else loss)
    batches = [batch for i, batch in enumerate(loader()) if i not in (0, 3)]
    expected = by_hand(net, batches)
    fit(net)
    assert_equal(net, expected)


def test_a_window_of_none_losses_steps_nothing():
    recorder, net = Recorder(), Returning(lambda loss, batch_idx: None)
    before = weights(net)
    fit(net, plugins=[recorder], accumulate_grad_batches=2)
    assert_equal(net, before)
    assert not {"backward", "reduce_gradients", "clip_gradients", "optimizer_step 0"} & set(
        recorder.calls
    )


def test_an_iterator_that_an_earlier_epoch_has_read_to_its_end_is_said_so():
    with pytest.raises(
        TrainingError,
        match=r"is an iterator, which earlier epochs have read to its end\. Fix: use a DataLoader",
    ):
        trainer(max_epochs=2).fit(Net(), iter(list(loader())))


def told(net, **options):
    """Return the warnings of a fit about a first epoch that trained nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(net, **options)
    return [
        str(warning.message) for warning in caught if "trained anything" in str(warning.message)
    ]


@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"accumulate_grad_batches": 4}])
def test_a_first_epoch_of_none_losses_is_one_warning(options):
    (message,) = told(Returning(lambda loss, _: None), **options)
    assert "every training_step returned None, or" in message


def test_a_first_epoch_in_which_no_stepped_parameter_got_a_gradient_is_a_warning():
    net = Net()
    net.make_optimizer = lambda _: SGD([torch.nn.Parameter(torch.zeros(2))])
    (message,) = told(net)
    assert (
        "only parameters that no optimizer steps. Fix: give configure_optimizers the parameters"
        in message
    )


@pytest.mark.parametrize(
    ("optimizer", "skipped"),
    [(SGD, range(5)), (partial(torch.optim.SGD, lr=0.0), range(1, 6)), (torch.optim.LBFGS, ())],
)
def test_a_first_epoch_with_one_step_that_trained_is_no_warning(optimizer, skipped):
    def loss_or_none(loss, batch_idx):
        return None if batch_idx in skipped else loss

    assert not told(Returning(loss_or_none, optimizer=optimizer))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda loss, _: loss.detach(), "requires_grad=False"),
        (lambda loss, _: loss * torch.ones(4), r"one number.*\[4\]"),
        (lambda loss, _: [loss], "returned list"),
        (lambda loss, _: {"losses": loss}, "'losses'"),
        (lambda loss, _: {"loss": 1.0}, "training_step returned"),
    ],
    ids=["detached", "not a scalar", "list", "dict without loss", "number in a dict"],
)
def test_a_loss_that_cannot_be_learnt_from(what, words):
    with pytest.raises(TrainingError, match=words):
        fit(Returning(what))


def test_the_users_own_error_in_backward_is_not_changed():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, grad):
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own") as caught:
        fit(Returning(lambda loss, _: Broken.apply(loss)))
    assert not isinstance(caught.value, TrainingError)


def test_training_step_may_take_the_batch_alone():
    class Short(Net):
        def training_step(self, batch):
            return self.loss(batch)

    assert fit(Short()).global_step == 6


def test_training_step_end_gets_a_list_of_one_output():
    class Ended(Net):
        got = ()

        def training_step(self, batch, batch_idx):
            return batch

        def training_step_end(self, outputs):
            self.got = (*self.got, (type(outputs), len(outputs)))
            return self.loss(outputs[0])

    net = Ended()
    expected = by_hand(net, loader())
    fit(net)
    assert net.got == ((list, 1),) * 6
    assert_equal(net, expected)


def test_training_epoch_end_gets_detached_outputs():
    class Ends(Returning):
        epochs = ()

        def training_epoch_end(self, outputs):
            self.epochs = (*self.epochs, list(outputs))

    net = Ends(lambda loss, _: {"loss": loss, "two": [loss * 2]})
    fit(net, max_epochs=2, accumulate_grad_batches=2)
    assert [len(outputs) for outputs in net.epochs] == [6, 6]
    for output in net.epochs[0]:
        assert not any(tensor.requires_grad for tensor in (output["loss"], *output["two"]))
    assert net.epochs[1][0]["loss"] < net.epochs[0][0]["loss"]  # it learns


# --- order ----------------------------------------------------------------------------------------


def test_hooks_of_a_step_in_order():
    class Two(Net):
        def configure_optimizers(self):
            two = [SGD(self.layers[0].parameters()), SGD(self.layers[2].parameters())]
            two[0].zero_grad = lambda: recorder.note("zero_grad 0")
            two[1].zero_grad = lambda: recorder.note("zero_grad 1")
            return two, [{"scheduler": Noting(two[0], recorder.note), "interval": "step"}]

    recorder = Recorder()
    fit(
        Two(), loader(12), plugins=[recorder], accumulate_grad_batches=2
    )  # 3 batches: a window of 2, one of 1
    after = [
        "reduce_gradients",
        "clip_gradients",
        "optimizer_step 0",
        "optimizer_step 1",
        "scheduler",
        "step done",
    ]
    assert recorder.calls == [
        "step 2",
        "zero_grad 0",
        "zero_grad 1",
        "micro_step first",
        "forward training_step 0",
        "backward",
        "micro_step last",
        "forward training_step 1",
        "backward",
        *after,
        "on_step_end 1",
        "step 1",
        "zero_grad 0",
        "zero_grad 1",
        "micro_step first last",
        "forward training_step 2",
        "backward",
        *after,
        "on_step_end 2",
    ]


def test_the_modules_own_hooks_in_order():
    recorder = Recorder()
    fit(Own(recorder.note), loader(4), loader(4), plugins=[recorder], num_sanity_val_steps=1)
    ours = (
        "step 1",
        "step done",
        "micro_step first last",
        "forward training_step 0",
        "forward validation_step 0",
    )
    calls = [call for call in recorder.calls if call not in ours]
    calls.remove("on_before_zero_grad")
    evaluation = [
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "validation_step",
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_end",
    ]
    assert calls == [
        "on_fit_start",
        "on_sanity_check_start",
        *evaluation,
        "on_sanity_check_end",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "training_step",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "reduce_gradients",
        "clip_gradients",
        "on_before_optimizer_step",
        "optimizer_step 0",
        "on_train_batch_end",
        "on_step_end 1",
        *evaluation,
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
    ]


def test_on_before_zero_grad_comes_before_the_gradients():
    class Before(Net):
        grads = ()

        def on_before_zero_grad(self, optimizer):
            self.grads = (*self.grads, self.layers[0].weight.grad is not None)

    net = Before()
    fit(net, limit_train_batches=2)
    assert net.grads == (
        False,
        True,
    )  # the first step's gradients are still there before the second


def test_on_train_batch_hooks_are_called_for_each_micro_batch():
    class Watching(Returning):
        started, ended = (), ()

        def on_train_batch_start(self, batch, batch_idx):
            self.started = (*self.started, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert torch.equal(batch[0], list(loader())[batch_idx][0])
            self.ended = (*self.ended, (batch_idx, outputs["idx"]))

    net = Watching(lambda loss, batch_idx: {"loss": loss, "idx": batch_idx})
    fit(net, accumulate_grad_batches=4, max_epochs=2)
    assert net.started == tuple(range(6)) * 2
    assert net.ended == tuple((i, i) for i in range(6)) * 2


class Leaves(EvalNet):
    """Ends an epoch at one batch."""

    def __init__(self, at):
        super().__init__()
        self.at, self.epochs = at, []
        self.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == self.at else None
        self.on_train_epoch_end = lambda: self.epochs.append(
            (self.trainer.run.batch_idx, self.global_step)
        )


@pytest.mark.parametrize(
    ("at", "accumulate", "expected", "callbacks"),
    [
        (0, 1, [(0, 0), (0, 0)], []),
        (2, 1, [(2, 2), (2, 4)], [Callback]),
        (3, 2, [(2, 1), (2, 2)], []),
    ],
)
def test_minus_one_of_on_train_batch_start_leaves_out_the_rest_of_the_epoch(
    at, accumulate, expected, callbacks
):
    net = Leaves(at)
    watches = [
        type("Watches", (one,), {"on_train_batch_start": lambda *_: None})() for one in callbacks
    ]
    options = {"accumulate_grad_batches": accumulate, "callbacks": watches}
    fit(net, val=loader(4), max_epochs=2, plugins=[Recorder()], **options)
    assert net.epochs == expected
    assert [stage for stage, *_ in net.seen] == ["validate", "validate"]


def test_so_it_does_in_manual_optimisation():
    net = Leaves(2)
    net.automatic_optimization = False
    net.training_step = lambda batch, batch_idx: (
        net.manual_backward(net.loss(batch)) or net.optimizers().step()
    )
    fit(net)
    assert net.epochs == [(2, 2)]


def test_on_one_of_several_ranks_it_is_an_error():
    class Odd(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.global_rank == 1 and batch_idx == 1 else None

        def train_dataloader(self):
            return loader()

    results = run_plugin(ranks=2, module=Odd(), check=False)
    assert any("returned -1 on rank 1" in str(result.error) for result in results)


@pytest.mark.parametrize("manual", [False, True])
def test_outputs_of_on_train_batch_end_have_no_graph(manual):
    kept = []

    class Keeps(Net):
        automatic_optimization = not manual

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            if manual:
                self.manual_backward(loss)
            return {"loss": loss, "more": [loss * 2]}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            kept.extend((outputs["loss"], *outputs["more"]))

    fit(Keeps(), **({} if manual else {"accumulate_grad_batches": 2}))
    assert len(kept) == 12
    assert not any(tensor.requires_grad for tensor in kept)


# --- hooks and counters in the loop ---------------------------------------------------------------


@pytest.mark.parametrize(("skips", "rate"), [(False, 0.1 * 0.5**6), (True, 0.1 * 0.5**4)])
def test_schedulers_wait_while_optimizer_step_returns_false(skips, rate):
    class Skip:
        calls = 0
        replaces = frozenset({"optimizer_step"})

        @hookimpl
        def optimizer_step(self, optimizer):
            self.calls += 1
            if skips and self.calls <= 2:
                return False
            return optimizer.step() and None

    class Scheduled(Net):
        def configure_optimizers(self):
            self.sgd = SGD(self.parameters())
            halve = torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.5)
            return {"optimizer": self.sgd, "lr_scheduler": {"scheduler": halve, "interval": "step"}}

    net = Scheduled()
    fit(net, plugins=[Skip()])
    assert net.sgd.param_groups[0]["lr"] == pytest.approx(rate)


def test_hooks_are_frozen_during_the_loop():
    class Late:
        seen = ()

        @hookimpl
        def on_epoch_start(self, run):
            assert not isinstance(run.hooks.on_step_end, HookCaller)
            self.seen = (*self.seen, "asked")
            with pytest.raises(UsageError, match="frozen"):
                run.hooks.manager.register(Late(), "late")

    late = Late()
    one = trainer(plugins=[late])
    one.fit(Net(), loader())
    one.fit(Net(), loader())  # the next run has its own callers
    assert late.seen == ("asked", "asked")
