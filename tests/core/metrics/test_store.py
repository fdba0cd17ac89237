"""self.log: names, reductions, weights, timing and errors."""

import math
from collections import ChainMap
from typing import ClassVar

import pytest
import torch
from small_models import EvalNet, Loggers, Logging, Net, by_hand, fit, loader
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import geartrain.metrics.store
from geartrain import TrainingError, hookimpl
from geartrain.callbacks import Callback, ModelCheckpoint


def sizes(*lengths):
    """Return batches of these lengths."""
    return [next(iter(loader(length, length))) for length in lengths]


def logged(value, *, train=None, metrics="callback_metrics", **options):
    """Return the metrics after ``self.log("x", value(batch_idx))`` in ``training_step``."""
    net = Logging(lambda self, batch, batch_idx: self.log("x", value(batch_idx), **options))
    return getattr(fit(net, loader() if train is None else train), metrics)


# --- times and names ------------------------------------------------------------------------------


class Everywhere(Net):
    def training_step(self, batch, batch_idx):
        self.log("train", float(batch_idx))
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val", float(batch_idx))

    def on_train_epoch_end(self):
        self.log("train_epoch", 7.0)

    def on_validation_epoch_end(self):
        self.log("val_epoch", 8.0)


class Reads(Callback):
    """Reads metrics in the hooks of an epoch's end, as Lightning's callbacks do."""

    def __init__(self):
        self.read = []

    def on_train_epoch_end(self, trainer, module):
        self.read.append(trainer.callback_metrics["loss"].item())

    def on_validation_epoch_end(self, trainer, module):
        self.read.append(trainer.callback_metrics["val_loss"].item())


def test_the_hooks_of_an_epochs_end_read_its_metrics():
    class EachEpoch(Net):
        def training_step(self, batch, batch_idx):
            self.log(
                "loss", self.trainer.current_epoch + batch_idx / 2, on_step=False, on_epoch=True
            )
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 10 * self.trainer.current_epoch + batch_idx / 2)

        def on_validation_epoch_end(self):
            assert (
                self.trainer.callback_metrics["val_loss"] == 10 * self.trainer.current_epoch + 1.25
            )

    reads, lines = Reads(), Loggers()
    fit(EachEpoch(), loader(), loader(), max_epochs=2, callbacks=[reads], plugins=[lines])
    assert reads.read == [1.25, 1.25, 11.25, 2.25]
    assert [metrics for _, metrics in lines.lines] == [
        {"val_loss": 1.25},
        {"loss": 1.25},
        {"val_loss": 11.25},
        {"loss": 2.25},
    ]


def test_defaults_of_on_step_and_on_epoch():
    """Steps log their newest value in training; everything else logs an epoch's mean."""
    lines = Loggers()
    one = fit(Everywhere(), val=loader(), plugins=[lines], log_every_n_steps=4)
    assert one.callback_metrics == {"train": 5.0, "val": 2.5, "train_epoch": 7.0, "val_epoch": 8.0}
    assert lines.lines[0] == (4, {"train": 3.0})
    assert {step for step, _ in lines.lines[1:]} == {6}
    assert ChainMap(*(metrics for _, metrics in lines.lines[1:])) == one.callback_metrics


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"x": 5.0}),
        ({"on_epoch": True}, {"x": 2.5, "x_step": 5.0, "x_epoch": 2.5}),
        ({"on_step": False, "on_epoch": True}, {"x": 2.5}),
    ],
)
def test_names(options, expected):
    assert logged(float, **options) == expected


def test_names_in_validation():
    net = Logging(validate=lambda self, *_: self.log("x", 1.0, on_step=True))
    assert set(fit(net, val=loader()).callback_metrics) == {"x", "x_step", "x_epoch"}


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 7]), (7, [7]), (50, [7])])
def test_log_every_n_steps(every, steps):
    lines = Loggers()
    net = Logging(lambda self, batch, _: self.log("steps", float(self.global_step + 1)))
    fit(net, loader(28), plugins=[lines], log_every_n_steps=every)
    assert lines.lines == [(step, {"steps": float(step)}) for step in steps]


def test_steps_are_counted_across_epochs():
    lines = Loggers()
    fit(
        Logging(lambda self, batch, _: self.log("x", 1.0)),
        plugins=[lines],
        log_every_n_steps=4,
        max_epochs=2,
    )
    assert [step for step, _ in lines.lines] == [4, 6, 8, 12]


def test_a_hook_of_a_plugin_may_log():
    class GradientNorm:
        @hookimpl(wrapper=True)
        def reduce_gradients(self, run):
            yield
            run.log(
                "grad_norm",
                torch.nn.utils.get_total_norm([p.grad for p in run.module.parameters()]),
            )

    net, norms = Net(), []
    by_hand(
        net,
        loader(),
        before_step=lambda m: norms.append(
            torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]).item()
        ),
    )
    assert fit(net, plugins=[GradientNorm()]).callback_metrics == {
        "grad_norm": pytest.approx(norms[-1])
    }


def test_metrics_of_a_validation_inside_an_epoch_stay_apart():
    def train(self, batch, batch_idx):
        self.log("x", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def validate(self, batch, batch_idx):
        self.log("x", 100.0, reduce_fx="max")  # the same name, other options: another metric

    lines = Loggers()
    fit(Logging(train, validate), val=loader(), val_check_interval=2, plugins=[lines])
    assert lines.lines == [(2, {"x": 100.0}), (4, {"x": 100.0}), (6, {"x": 100.0}), (6, {"x": 6.0})]


# --- reductions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", 2.5), (torch.sum, 15.0), (torch.min, 0.0), (max, 5.0)]
)
@pytest.mark.parametrize("make", [float, lambda i: torch.tensor([[float(i)]], requires_grad=True)])
def test_reductions(reduce_fx, expected, make):
    assert logged(make, on_step=False, on_epoch=True, reduce_fx=reduce_fx) == {"x": expected}


@pytest.mark.parametrize(("reduce_fx", "where"), [("mean", 3), ("min", 0), ("max", 3), ("max", 5)])
def test_nan_is_not_dropped(reduce_fx, where):
    def value(i):
        return math.nan if i == where else float(i)

    values = logged(value, on_step=False, on_epoch=True, reduce_fx=reduce_fx)
    assert math.isnan(values["x"])


def test_a_value_of_1_has_the_mean_1_whatever_the_batch_sizes():
    train = sizes(1, 2, 2, 7, 3)
    assert logged(lambda i: 1.0, train=train, on_step=False, on_epoch=True) == {"x": 1.0}


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 2 / 3), ({"batch_size": 5}, 1 / 2)], ids=["inferred", "given"]
)
def test_a_mean_is_weighted_by_batch_size(options, expected):
    assert logged(float, train=sizes(1, 2), on_step=False, on_epoch=True, **options)[
        "x"
    ] == pytest.approx(expected)


def test_a_batch_size_that_torch_counted_is_a_number():
    net = Logging(
        lambda self, batch, i: self.log(
            "x", float(i), on_step=False, on_epoch=True, batch_size=torch.tensor((1, 3)[i])
        )
    )
    value = fit(net, limit_train_batches=2).run.metrics["x"]
    assert (type(value), value) == (float, 3 / 4)


@pytest.mark.parametrize("size", [-1, 2.5, "4", torch.tensor([1, 2])])
def test_a_batch_size_that_is_no_count_is_refused(size):
    with pytest.raises(
        TrainingError,
        match=r"self.log\('x'\): batch_size=.* is no whole number of samples, 0 or more\. Fix",
    ):
        fit(Logging(lambda self, batch, i: self.log("x", 1.0, batch_size=size)))


def test_values_of_other_dtypes_and_plain_numbers_mix():
    values = (
        True,
        2,
        3.0,
        torch.tensor(4),
        torch.tensor(5.0, dtype=torch.float16),
        torch.tensor(6.0, dtype=torch.float64),
    )
    assert logged(values.__getitem__, on_step=False, on_epoch=True, reduce_fx="sum") == {"x": 21.0}


# --- loggers and progress bar ---------------------------------------------------------------------


def test_logger_and_prog_bar():
    lines = Loggers()

    def train(self, batch, batch_idx):
        self.log_dict({"a": 1.0, "b": torch.tensor(2.0)}, logger=False, prog_bar=True)
        self.log("c", 3.0)

    one = fit(Logging(train), plugins=[lines])
    assert one.callback_metrics == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert one.logged_metrics == {"c": 3.0}
    assert one.run.logs.prog_bar == {"a": 1.0, "b": 2.0}
    assert lines.lines == [(6, {"c": 3.0})]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("x", torch.ones(3)), {}, r"one number.*\[3\]"),
        (("x", "1.0"), {}, "not str"),
        (("x", 1j), {}, "not complex"),
        (("x", torch.tensor(1j)), {}, "not complex"),
        (("", 1.0), {}, "non-empty string"),
        ((3, 1.0), {}, "non-empty string"),
        (("\x1b[31mloss", 1.0), {}, r"'\\x1b\[31mloss' has a control character. Fix: take it out"),
        (("x", 1.0), {"reduce_fx": "mena"}, "Did you mean 'mean'"),
        (("x", 1.0), {"reduce_fx": 3}, "unknown reduction.*mean"),
        (("x", 1.0), {"reduce_fx": lambda values: values * torch.ones(2)}, "not one number"),
        (("x", 1.0), {"rank_zero_only": True, "sync_dist": True}, "rank_zero_only and sync_dist"),
    ],
)
def test_values_that_cannot_be_logged(arguments, options, words):
    with pytest.raises(TrainingError, match=words):
        fit(Logging(lambda self, batch, batch_idx: self.log(*arguments, **options)))


@pytest.mark.parametrize("options", [{"reduce_fx": "sum"}, {"on_epoch": True}])
def test_other_options_for_the_same_name_are_an_error_that_shows_both(options):
    def train(self, batch, batch_idx):
        self.log("x", 1.0)
        self.log("x", 1.0, **options)

    (name,) = options
    with pytest.raises(TrainingError, match=rf"'x'.*{name}=.* then, .* now"):
        fit(Logging(train))


# --- nothing waits for the device -----------------------------------------------------------------


class Far(torch.Tensor):
    """A tensor that imitates one on a GPU; ``steps`` has the step of each copy to the CPU."""

    steps: ClassVar = []
    now: ClassVar = [0]

    @staticmethod
    def __new__(cls, here):
        return torch.Tensor._make_wrapper_subclass(cls, here.shape, dtype=here.dtype, device="cuda")

    def __init__(self, here):
        self.here = here

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        result = function(*tree_map_only(cls, lambda far: far.here, args), **(kwargs or {}))
        if function in (
            torch.ops.aten._to_copy.default,
            torch.ops.aten._local_scalar_dense.default,
        ):
            cls.steps.append(cls.now[0])
            return result
        return (
            args[0]
            if function is torch.ops.aten.add_.Tensor
            else tree_map_only(torch.Tensor, cls, result)
        )


@pytest.fixture
def far(monkeypatch):
    monkeypatch.setattr(Far, "steps", [])
    monkeypatch.setattr(Far, "now", [0])
    return Far


def test_no_tensor_is_read_between_flushes(far, monkeypatch):
    """Count reads, at which the CPU waits: ``item``, ``float`` and ``bool`` are one operation."""
    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                reads.append(far.now[0])
            return function(*args, **(kwargs or {}))

    for name in ("tolist", "numpy", "__array__"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, *args, own=own: reads.append(far.now[0]) or own(self, *args),
        )

    class Count:
        @hookimpl
        def on_step_end(self, run):
            far.now[0] = run.step

    def train(self, batch, batch_idx):
        loss = self.loss(batch).detach()
        self.log("a", far(loss), prog_bar=True, on_epoch=True)
        self.log("b", far(loss * 2), reduce_fx="max", sync_dist=True)

    batches = list(loader(40))
    with Reads():
        fit(Logging(train), batches, plugins=[Count()], log_every_n_steps=4, gradient_clip_val=1.0)
    assert far.steps == [4, 8, 10]  # one read a flush, of all metrics together
    assert set(reads) == {4, 8, 10}


def test_a_value_that_would_be_reported_never_is_refused():
    net = Logging(lambda self, *_: self.log("x", 1.0, on_step=False))
    with pytest.raises(
        TrainingError, match=r"self.log\('x'\) would never be reported.*Fix: on_step=True"
    ):
        fit(net)
    with pytest.raises(TrainingError, match="would never be reported"):
        fit(Logging(validate=lambda self, *_: self.log("x", 1.0, on_epoch=False)), val=loader(4))


def test_only_the_monitored_metric_is_read_in_the_step(far, tmp_path, monkeypatch):
    """a is monitored at steps 3 and 6, b is not, and the last flush reads both."""

    class Count:
        @hookimpl
        def on_step_end(self, run):
            far.now[0] = run.step

    def train(self, batch, batch_idx):
        self.log("a", far(torch.tensor(float(-batch_idx))))
        self.log("b", far(torch.tensor(1.0)))

    reads, own = [], geartrain.metrics.store._read
    monkeypatch.setattr(
        geartrain.metrics.store,
        "_read",
        lambda tensors: reads.append((far.now[0], len(tensors))) or own(tensors),
    )
    monitor = ModelCheckpoint(
        "a", every_n_train_steps=3, mode="max", dirpath=tmp_path
    )  # step 6 is no better, and not saved
    fit(Logging(train), list(loader(28)), plugins=[Count(), monitor])
    # A checkpoint keeps all that was logged.
    assert [one for one in reads if one[1]] == [(3, 1), (3, 1), (6, 1), (7, 2)]
    assert monitor.best_model_score == -2.0


def test_newest_metrics_are_those_of_the_step():
    class Asks:
        def __init__(self):
            self.seen = []

        @hookimpl
        def on_step_end(self, run):
            told = run.trainer.callback_metrics["loss"]
            assert (told.shape, told.device.type) == ((), "cpu")
            self.seen.append(
                (run.step, told.item(), run.metrics["loss_step"], "epochs" in run.metrics)
            )

    def train(self, batch, batch_idx):
        self.log("loss", torch.tensor(float(batch_idx)), on_epoch=True)
        self.log("epochs", 1.0, on_step=False, on_epoch=True)

    asks, lines = Asks(), Loggers()
    one = fit(Logging(train), plugins=[asks, lines], log_every_n_steps=4)
    assert asks.seen == [(step, step - 1.0, step - 1.0, False) for step in range(1, 7)]
    assert lines.lines[:2] == [
        (4, {"loss_step": 3.0}),
        (6, {"loss_step": 5.0}),
    ]  # reading reports nothing
    assert one.callback_metrics["loss"].item() == one.logged_metrics["loss_epoch"].item() == 2.5


def test_while_it_validates_the_newest_value_of_a_name_is_the_validations():
    seen = []

    class Asks:
        @hookimpl
        def on_validation_end(self, run):
            seen.append((run.metrics["both"], run.metrics["train"]))

    def train(self, batch, batch_idx):
        self.log_dict({"both": float(batch_idx), "train": float(batch_idx)})

    fit(
        Logging(train, lambda self, *_: self.log("both", 9.0)),
        val=loader(4),
        plugins=[Asks()],
        val_check_interval=2,
    )
    assert seen == [(9.0, 1.0), (9.0, 3.0), (9.0, 5.0)]


@pytest.mark.parametrize(("on", "on_epoch"), [(torch.Tensor, True), (Far, False), (Far, True)])
def test_a_running_total_that_is_changed_in_place(far, on, on_epoch):
    total = on(torch.zeros(()))

    def train(self, batch, batch_idx):
        total.add_(1.0)
        self.log("total", total, reduce_fx="sum", on_epoch=on_epoch, batch_size=1)

    one = fit(Logging(train), log_every_n_steps=4)
    assert one.callback_metrics["total"] == (1.0 + 2 + 3 + 4 + 5 + 6 if on_epoch else 6.0)


def test_a_step_logs_the_value_that_it_had_then(far):
    """A change of the tensor between ``self.log`` and the flush does not count."""
    for on in (torch.Tensor, far):
        total = on(torch.zeros(()))

        def train(self, batch, batch_idx, total=total):
            self.log("total", total.add_(1.0))
            total.add_(100.0)

        assert fit(Logging(train), max_steps=3).callback_metrics["total"] == 203.0


# --- too late to be reported ----------------------------------------------------------------------


@pytest.mark.parametrize("late", ["on_train_end", "on_validation_end"])
def test_a_value_that_would_be_lost_is_an_error(late):
    net = EvalNet()
    setattr(net, late, lambda: net.log("late", 1.0))
    with pytest.raises(TrainingError, match=r"'late'.*would be lost.*on_train_epoch_end"):
        fit(net, val=loader())


def test_values_logged_before_the_first_epoch_belong_to_it():
    net = Net()
    net.on_train_start = lambda: net.log("early", 3.0)
    assert fit(net).callback_metrics["early"] == 3.0


def test_names_of_each_line_are_refused():
    with pytest.raises(TrainingError, match=r"self.log\('stage'\).*Fix: use another name"):
        fit(Logging(lambda self, *_: self.log("stage", 1.0)))
