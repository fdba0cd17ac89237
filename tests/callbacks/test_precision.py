"""Precisions train as torch's own loop does; 16-mixed skips and counts steps that overflow."""

import copy
import gc
import warnings
import weakref
from collections import namedtuple
from functools import partial

import pytest
import torch
from small_models import (
    SGD,
    EvalNet,
    Loggers,
    Net,
    Stream,
    assert_equal,
    by_hand,
    differ,
    fit,
    loader,
    samples,
    trainer,
    weights,
)
from threads import on_threads
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import UsageError, hookimpl
from geartrain_callbacks.precision import ScaledPrecision

ADAM = partial(torch.optim.Adam, lr=0.01)
TRUE = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
#: Below every gradient's norm in these runs.
LIMIT = 0.05


#: A factor with which no gradient overflows at the scaler's first scale, 65536.
GENTLE = 0.01


class Gentle(Net):
    def loss(self, batch):
        return super().loss(batch) * GENTLE


def cast(batches, dtype):
    return [tuple(t.to(dtype) for t in batch) for batch in batches]


def by_hand_mixed(module, batches, dtype, optimizer=SGD, clip=None, window=1):
    """Train as torch's documentation of autocast and the scaler does; return module and scale."""
    module = copy.deepcopy(module)
    stepper = optimizer(module.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    batches = list(batches)
    for start in range(0, len(batches), window):
        stepper.zero_grad()
        micro = batches[start : start + window]
        for batch in micro:
            with torch.autocast("cpu", dtype):
                loss = module.loss(batch)
            scaler.scale(loss / len(micro)).backward()
        scaler.unscale_(stepper)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        scaler.step(stepper)
        scaler.update()
    return module, scaler.get_scale()


# --- *-true ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "optimizer"), [("64-true", ADAM), ("bf16-true", SGD)])
def test_true_precision_equals_a_loop_written_by_hand_in_that_dtype(precision, optimizer):
    dtype, net = TRUE[precision], Net(optimizer)
    expected = by_hand(copy.deepcopy(net).to(dtype), cast(loader(), dtype), optimizer)
    fit(net, precision=precision)
    assert {p.dtype for p in net.parameters()} == {dtype}
    assert_equal(net, expected)


class Looking(EvalNet):
    """Records the dtypes in its steps."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def look(self, name, batch):
        made = torch.zeros(1)
        x = batch["pair"].x if isinstance(batch, dict) else batch[0]
        self.dtypes.setdefault(name, set()).add((x.dtype, self(x).dtype, made.dtype))

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        self.look("train", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.look("validate", batch)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.look("test", batch)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.look("predict", batch)
        return self(batch[0])


@pytest.mark.parametrize(
    ("precision", "of_batch", "of_output", "made"),
    [
        ("64-true", torch.float64, torch.float64, torch.float64),
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.float32),
        ("16-mixed", torch.float32, torch.float16, torch.float32),
    ],
)
def test_batches_outputs_and_new_tensors_have_the_dtype_in_every_stage(
    precision, of_batch, of_output, made
):
    net, one = Looking(), trainer(precision=precision)
    one.fit(net, loader(), loader())
    one.test(net, loader())
    outputs = one.predict(net, loader())
    assert net.dtypes == {
        stage: {(of_batch, of_output, made)} for stage in ("train", "validate", "test", "predict")
    }
    assert {output.dtype for output in outputs} == {of_output}
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


Pair = namedtuple("Pair", "x y")


class Nested(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("turn", torch.ones(1, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen = None

    def training_step(self, batch, batch_idx):
        self.seen = batch
        return self(batch["pair"].x * self.scale).sum()


def test_only_floating_point_changes_in_any_nesting():
    x = torch.ones(2, 3)
    batch = {
        "pair": Pair(x, torch.tensor([1, 2])),
        "mask": [torch.tensor([True])],
        "name": "a",
        "phase": torch.ones(1, dtype=torch.complex64),
    }
    net = Nested()
    fit(net, Stream([batch]), precision="64-true")
    seen = net.seen
    assert (seen["pair"].x.dtype, seen["pair"].y.dtype) == (torch.float64, torch.int64)
    assert (seen["mask"][0].dtype, seen["name"], seen["phase"].dtype) == (
        torch.bool,
        "a",
        torch.complex64,
    )
    assert (net.scale.dtype, net.turn.dtype, net.count.dtype) == (
        torch.float64,
        torch.complex64,
        torch.int64,
    )
    assert x.dtype == torch.float32


def test_the_default_dtype_is_put_back_after_an_error():
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fit(Breaks(), precision="64-true")
    assert torch.get_default_dtype() == torch.float32


def test_a_users_generator_continues_in_the_next_epoch():
    def endless():
        while True:
            yield from loader()

    batches = endless()
    one = fit(Net(), batches, precision="64-true", limit_train_batches=4, max_epochs=3)
    assert one.global_step == 12


def test_prefetching_batches_are_closed_with_those_that_are_cast():
    class Prefetches:
        replaces = frozenset({"device_batches"})

        @hookimpl
        def device_batches(self, loader):
            self.kept = self.read(loader)  # held here too, so that nothing but a close() ends it
            return self.kept

        def read(self, loader):
            yield from loader

    batches = Prefetches()
    fit(Net(), precision="64-true", limit_train_batches=2, plugins=[batches])
    assert next(batches.kept, "closed") == "closed"


# --- *-mixed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "optimizer", "clip", "window"),
    [
        ("16-mixed", SGD, LIMIT, 1),
        ("16-mixed", ADAM, None, 4),
        ("16-mixed", ADAM, LIMIT, 4),
        ("bf16-mixed", SGD, LIMIT, 4),
    ],
)
def test_mixed_precision_equals_a_loop_written_by_hand(precision, optimizer, clip, window):
    net = Net(optimizer)
    expected, _ = by_hand_mixed(net, loader(), MIXED[precision], optimizer, clip, window)
    unclipped, _ = by_hand_mixed(net, loader(), MIXED[precision], optimizer, None, window)
    plain = by_hand(net, loader(), optimizer)
    fit(net, precision=precision, gradient_clip_val=clip, accumulate_grad_batches=window)
    assert_equal(net, expected)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert differ(net, plain)
    assert clip is None or differ(net, unclipped)


class Watch:
    """Record the gradients' norm after the reduction, and before the step."""

    def __init__(self):
        self.reduced, self.stepped = [], []

    def norm(self, run):
        return float(torch.nn.utils.get_total_norm([p.grad for p in run.module.parameters()]))

    @hookimpl(wrapper=True)
    def reduce_gradients(self, run):
        yield
        self.reduced.append(self.norm(run))

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        self.stepped.append(self.norm(run))
        return (yield)


def test_plugins_and_clipping_see_unscaled_gradients():
    mixed, plain = Watch(), Watch()
    net = Gentle()
    fit(copy.deepcopy(net), plugins=[plain], max_steps=1)
    limit = plain.reduced[0] / 2
    fit(net, precision="16-mixed", plugins=[mixed], gradient_clip_val=limit, max_steps=1)
    assert mixed.reduced == pytest.approx(plain.reduced, rel=0.05)
    assert mixed.stepped == pytest.approx([limit], rel=0.01)


# --- 16-mixed: overflow ---------------------------------------------------------------------------


class Overflowing(Gentle):
    """Its gradient is infinite at the steps in ``at``."""

    def __init__(self, at, optimizer=SGD, gamma=0.5):
        super().__init__(optimizer)
        self.at, self.gamma, self.history = at, gamma, []

    def training_step(self, batch, batch_idx):
        self.history.append({name: tensor.clone() for name, tensor in weights(self).items()})
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx in self.at else loss

    def on_train_end(self):
        self.history.append(weights(self))

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        self.optimizer, self.schedule = (
            optimizer,
            torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma),
        )
        return [optimizer], [{"scheduler": self.schedule, "interval": "step"}]

    def moved(self):
        """Record for each step if it changed any weight."""
        return [
            any(not torch.equal(a[k], b[k]) for k in a)
            for a, b in zip(self.history, self.history[1:], strict=False)
        ]


@pytest.mark.parametrize("optimizer", [ADAM, partial(torch.optim.Adam, lr=0.01, fused=True)])
def test_a_step_that_overflows_changes_nothing_is_counted_and_schedulers_wait(optimizer):
    net, seen = Overflowing({1, 3}, optimizer), Loggers()
    one = fit(net, precision="16-mixed", plugins=[seen])
    assert net.moved() == [True, False, True, False, True, True]
    assert net.schedule.last_epoch == 4  # a scheduler steps only where its optimizer did
    assert one.callback_metrics["skipped_steps"] == 2
    assert {"skipped_steps": 2.0} in [metrics for _, metrics in seen.lines]
    assert one.global_step == 6
    assert not net.optimizer._optimizer_step_pre_hooks


def test_skipped_steps_are_counted_for_each_epoch_and_no_skip_is_zero():
    net = Overflowing({0})
    lines = Loggers()
    fit(net, precision="16-mixed", plugins=[lines], max_epochs=2)
    assert [
        metrics["skipped_steps"] for _, metrics in lines.lines if "skipped_steps" in metrics
    ] == [1.0, 1.0]
    fine = fit(Overflowing(()), precision="16-mixed")
    assert fine.callback_metrics["skipped_steps"] == 0
    assert "skipped_steps" not in fit(Net(), precision="bf16-mixed").callback_metrics


class Two(gt.Module):
    """Optimizers in ``order``; the second's layer is used at even batches, overflows at ``at``."""

    def __init__(self, at=(), order=1):
        super().__init__()
        self.first, self.second, self.at, self.order = nn.Linear(3, 1), nn.Linear(3, 1), at, order

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.first(x), y)
        if batch_idx % 2 == 0:
            other = nn.functional.mse_loss(self.second(x), y)
            loss = loss + (other * float("inf") if batch_idx in self.at else other)
        return loss * GENTLE

    def configure_optimizers(self):
        return [SGD(self.first.parameters()), SGD(self.second.parameters())][:: self.order]


def test_two_optimizers_of_which_one_has_no_gradients_now_and_then():
    net = Two()
    expected = copy.deepcopy(net)
    steppers = expected.configure_optimizers()
    for i, batch in enumerate(loader()):
        for stepper in steppers:
            stepper.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = expected.training_step(batch, i)
        (loss * 65536.0).backward()
        for parameter in expected.parameters():
            if parameter.grad is not None:
                parameter.grad /= 65536.0
        for stepper in steppers:
            stepper.step()
    assert fit(net, precision="16-mixed").callback_metrics["skipped_steps"] == 0
    assert_equal(net, expected)


def test_no_optimizer_has_gradients():
    class Elsewhere(Gentle):
        def configure_optimizers(self):
            return SGD([nn.Parameter(torch.ones(1))])

    assert fit(Elsewhere(), precision="16-mixed").callback_metrics["skipped_steps"] == 0


@pytest.mark.parametrize("order", [1, -1])
def test_a_training_step_is_counted_once_and_one_optimizer_skips_alone(order):
    net = Two({0, 2, 4}, order)
    before = copy.deepcopy(net)
    one = fit(net, precision="16-mixed")
    assert one.callback_metrics["skipped_steps"] == 3
    assert differ(net.first, before.first)
    assert_equal(net.second, before.second)


def test_a_step_without_a_loss_leaves_the_scaler_ready():
    class Sometimes(Gentle):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 2 else self.loss(batch)

    net = Sometimes()
    expected, _ = by_hand_mixed(net, list(loader())[::2], torch.float16)
    assert fit(net, precision="16-mixed").callback_metrics["skipped_steps"] == 0
    assert_equal(net, expected)


# --- refusals -------------------------------------------------------------------------------------


def test_an_optimizer_with_a_closure_is_refused_in_16_mixed_and_trains_in_bf16():
    lbfgs = partial(torch.optim.LBFGS, lr=0.1, max_iter=2)
    with pytest.raises(
        UsageError,
        match=r"-callbacks\[16-mixed\] cannot skip .* closure. Fix: --precision bf16-mixed",
    ):
        fit(Net(lbfgs), precision="16-mixed")
    net = Net(lbfgs)
    before = copy.deepcopy(net)
    fit(net, precision="bf16-mixed")
    assert differ(net, before)


def test_float16_weights_are_refused_before_anything_starts():
    class Never:
        @hookimpl(wrapper=True)
        def launch(self):
            raise AssertionError("something has started")
            yield

    with pytest.raises(
        UsageError,
        match=r"callbacks\[16-mixed\]: Net\.layers\.0\.weight is float16.*Fix: take out \.half\(\)",
    ):
        fit(Net().half(), precision="16-mixed", plugins=[Never()])


def test_two_optimizers_that_share_a_parameter_are_refused():
    class Shared(Net):
        def configure_optimizers(self):
            return [SGD(self.parameters()), SGD(self.layers[0].parameters())]

    with pytest.raises(
        UsageError, match=r"geartrain-callbacks\[16-mixed\]: two optimizers share a parameter"
    ):
        fit(Shared(), precision="16-mixed")


@pytest.mark.parametrize("hook", ["backward", "optimizer_step"])
def test_a_plugin_that_replaces_a_hook_of_the_scaler_is_refused(hook):
    def own(self):
        raise AssertionError

    replacing = type("Mine", (), {"replaces": {hook}, hook: hookimpl(own)})
    with pytest.raises(
        UsageError,
        match=rf"geartrain-callbacks\[16-mixed\] must own the hook '{hook}', and Mine does",
    ):
        trainer(precision="16-mixed", plugins=[replacing()])
    trainer(precision="bf16-mixed", plugins=[replacing()])


def test_a_device_without_autocast_is_refused():
    class Meta:
        priority, indexed = 1, True

        def unavailable(self):
            return None

        def device_count(self):
            return 1

        @hookimpl
        def setup_device(self):
            return torch.device("meta")

    with pytest.raises(
        UsageError,
        match=r"-callbacks\[bf16-mixed\]: torch has no autocast for meta. Fix: --precision 32",
    ):
        fit(Net(), accelerator=Meta(), devices=1, precision="bf16-mixed")


def test_a_device_that_cannot_compute_in_the_format_is_refused(monkeypatch):
    """torch only warns, and its autocast does nothing."""
    real = torch.autocast

    def cannot(device_type, dtype):
        warnings.warn(
            f"In MPS autocast, but the target dtype {dtype} is not supported. Disabling autocast.",
            stacklevel=2,
        )
        return real(device_type, dtype, enabled=False)

    monkeypatch.setattr(torch, "autocast", cannot)
    with pytest.raises(
        UsageError,
        match=r"callbacks\[bf16-mixed\]: cpu does not support torch.bfloat16: .*Disabling autocast",
    ):
        fit(Net(), precision="bf16-mixed")


def test_the_batch_as_it_was_is_not_kept_beside_the_new_one():
    class Sees(Net):
        def training_step(self, batch, batch_idx):
            gc.collect()
            alive.append([made() is not None for made in given])
            return self.loss(batch)

    class Given:
        """Batches to which only the caller has a reference."""

        def __iter__(self):
            self.left = 6
            return self

        def __next__(self):
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            batch = torch.ones(4, 3), torch.ones(4, 1)
            given.append(weakref.ref(batch[0]))
            return batch

    given, alive = [], []
    fit(Sees(), Given(), precision="bf16-true")
    assert [sum(row) for row in alive] == [0] * 6


# --- with other parts -----------------------------------------------------------------------------


def test_32_true_adds_no_part_and_wraps_nothing():
    one = trainer()
    assert one.precision == "32-true"
    assert [choice.name for choice in one.hooks.wrappers("forward")] == []
    assert [choice.name for choice in trainer(precision=16).hooks.wrappers("forward")] == [
        "16-mixed"
    ]


def test_the_second_fit_starts_with_a_scale_of_its_own():
    one = trainer(precision="16-mixed")
    for _ in range(2):
        net = Net()
        expected, _ = by_hand_mixed(net, loader(), torch.float16)
        one.fit(net, loader())
        assert_equal(net, expected)


def test_a_checkpoint_of_another_precision_loads(tmp_path):
    fit(Net(), precision="bf16-mixed", output=tmp_path / "run", seed=1)
    net = EvalNet()
    one = trainer(precision="64-true")
    one.validate(net, DataLoader(samples(), batch_size=4), ckpt_path=tmp_path / "run" / "last.ckpt")
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    stored = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["model"]
    for name, tensor in weights(net).items():
        assert torch.equal(tensor, stored[name].double())


def test_a_copy_that_was_never_set_up_takes_the_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    never = ScaledPrecision()
    never.load_state_dict(scaler.state_dict())
    assert never.state_dict()["scale"] == 2.0


def test_two_fits_on_ranks():
    runner = on_threads(2, precision="16-mixed", max_epochs=1, enable_progress_bar=False)[0]
    for _ in range(2):
        runner.fit(Net(), loader(batch_size=2))
    assert runner.global_step
