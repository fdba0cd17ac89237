"""Validation, test and prediction: their times, their batches and their results."""

import random

import pytest
import torch
from small_models import (
    EvalNet,
    Loggers,
    Logging,
    Net,
    Stream,
    assert_equal,
    by_hand,
    fit,
    loader,
    trainer,
    weights,
)
from threads import on_threads
from torch import nn

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl

# --- when -----------------------------------------------------------------------------------------


class Times:
    """Records the steps done at each validation, and its stage."""

    def __init__(self):
        self.steps, self.stages = [], []

    @hookimpl
    def on_validation_start(self, run):
        self.steps.append(run.step)
        self.stages.append(run.stage)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [6, 12]),
        ({"val_check_interval": 0.5}, [3, 6, 9, 12]),
        ({"val_check_interval": 0.7}, [4, 10]),
        ({"val_check_interval": 0.01}, list(range(1, 13))),
        ({"val_check_interval": 4}, [4, 10]),
        ({"val_check_interval": 1}, list(range(1, 13))),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 3}, [9, 12]),
        ({"check_val_every_n_epoch": 3}, []),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4}, [4, 8, 12]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 9}, [9]),
        # The step that takes the third batch takes the fourth too.
        ({"accumulate_grad_batches": 2, "val_check_interval": 3}, [2, 3, 5, 6]),
        # A batch in which several intervals end is validated once.
        ({"accumulate_grad_batches": 3, "val_check_interval": 1}, [1, 2, 3, 4]),
        ({"limit_train_batches": 4, "val_check_interval": 0.5}, [2, 4, 6, 8]),
        ({"limit_val_batches": 0}, []),
        ({"max_steps": 8}, [6, 8]),
    ],
)
def test_schedule(options, steps):
    """Two epochs of 6 batches."""
    times = Times()
    fit(EvalNet(), val=loader(), plugins=[times], **{"max_epochs": 2, **options})
    assert times.steps == steps
    assert set(times.stages) <= {"validate"}


def test_an_interval_longer_than_an_epoch_is_an_error():
    with pytest.raises(UsageError, match=r"7.*6 batches.*check_val_every_n_epoch=None"):
        fit(EvalNet(), val=loader(), val_check_interval=7)


def test_a_fraction_of_a_loader_without_length_is_an_error():
    with pytest.raises(UsageError, match="without length"):
        fit(EvalNet(), Stream(loader()), loader(), val_check_interval=0.5)


def test_an_interval_in_batches_of_a_loader_without_length():
    times = Times()
    fit(EvalNet(), Stream(loader()), loader(), val_check_interval=4, plugins=[times])
    assert times.steps == [4]


# --- how many batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "limit", "batches"),
    [("validate", 0.5, 3), ("validate", 1.0, 6), ("test", 2, 2), ("predict", 1, 1)],
)
def test_limits(command, limit, batches):
    net = EvalNet()
    one = trainer(**{f"limit_{'val' if command == 'validate' else command}_batches": limit})
    outputs = getattr(one, command)(net, loader())
    assert len(outputs if command == "predict" else net.seen) == batches


def test_a_limit_of_one_loader_holds_for_each():
    net = EvalNet()
    trainer(limit_val_batches=0.5).validate(net, [loader(24), loader(8)])
    assert [(batch, idx) for _, batch, idx in net.seen] == [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_an_iterator_as_validation_loader_is_an_error_before_training():
    net = EvalNet()
    with pytest.raises(UsageError, match=r"only one validation can read. Fix: use a DataLoader"):
        fit(net, val=(batch for batch in loader()), num_sanity_val_steps=0)
    assert net.seen == []


class Once:
    """An iterable that gives batches to its first reader only."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __iter__(self):
        yield from self.batches


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_validation_without_a_batch_ends_the_run(ranks):
    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    run = trainer(**options) if ranks == 1 else on_threads(ranks, **options)[0]
    with pytest.raises(TrainingError, match=r"validate loader gave no batch: Once. Fix: .*"):
        run.fit(EvalNet(), loader(), Once(list(loader())))
    assert run.current_epoch == 1


@pytest.mark.parametrize("command", ["test", "predict"])
def test_other_evaluations_without_a_batch_are_errors(command):
    with pytest.raises(TrainingError, match=rf"{command} loader gave no batch: generator"):
        getattr(trainer(), command)(EvalNet(), (batch for batch in ()))


# --- sanity check ---------------------------------------------------------------------------------


def test_the_hooks_of_a_sanity_check_see_its_stage():
    seen, net = [], EvalNet()
    for name in ("on_sanity_check_start", "on_sanity_check_end", "on_train_start"):
        setattr(net, name, lambda: seen.append((net.trainer.sanity_checking, net.trainer.training)))
    fit(net, val=loader(), num_sanity_val_steps=1)
    assert seen == [(True, False), (True, False), (False, True)]


@pytest.mark.parametrize(("steps", "batches"), [(2, 2), (50, 6), (-1, 6)])
def test_sanity_check_runs_so_many_batches(steps, batches):
    net = EvalNet()
    fit(net, val=loader(), num_sanity_val_steps=steps, max_epochs=0)
    assert net.seen == [("sanity_check", i, 0) for i in range(batches)]


def test_sanity_check_runs_no_more_batches_than_validation_does():
    net = EvalNet()
    fit(net, val=loader(), num_sanity_val_steps=4, limit_val_batches=3, max_epochs=0)
    assert len(net.seen) == 3


def test_sanity_check_leaves_no_metrics_and_trains_the_same():
    class Peek:
        seen = None

        @hookimpl
        def on_epoch_start(self, run):
            self.seen = (
                dict(run.metrics),
                dict(run.trainer.logged_metrics),
                dict(run.logs.prog_bar),
                run.stage,
            )

    peek, lines = Peek(), Loggers()
    net = Logging(
        validate=lambda self, batch, _: self.log(
            "loss", self.loss(batch), prog_bar=True, on_step=True, on_epoch=True
        )
    )
    expected = by_hand(net, loader())
    fit(net, val=loader(), num_sanity_val_steps=2, limit_train_batches=6, plugins=[peek, lines])
    assert peek.seen == ({}, {}, {}, "train")
    assert {step for step, _ in lines.lines} == {6}  # only the real validation was logged
    assert_equal(net, expected)


class Dropping(EvalNet):
    """Has dropout in training, and draws random numbers in the sanity check."""

    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.Dropout(0.5))

    def validation_step(self, batch, batch_idx):
        torch.rand(2)
        random.random()

    def on_sanity_check_start(self):
        torch.rand(3)


def shares_a_generator():
    generator = torch.Generator().manual_seed(3)
    return [loader(shuffle=True, generator=generator) for _ in range(2)]


@pytest.mark.parametrize(
    "loaders",
    [
        lambda: [loader(shuffle=True), loader(num_workers=1, persistent_workers=True)],
        lambda: [loader(shuffle=True), {"a": loader(), "b": loader(shuffle=True)}],
        shares_a_generator,
    ],
    ids=["persistent workers", "combined", "one generator"],
)
def test_sanity_check_uses_up_no_random_numbers(loaders):
    found = []
    for steps in (0, 2):
        torch.manual_seed(0)
        net = Dropping()
        fit(net, *loaders(), seed=1, num_sanity_val_steps=steps)
        found.append(
            {**weights(net), "next": torch.rand(3), "python": torch.tensor(random.random())}
        )
    assert_equal(*found)


def test_sanity_check_uses_up_no_random_numbers_of_any_rank():
    found = []
    for steps in (0, 2):
        torch.manual_seed(0)
        one, strategy = on_threads(seed=1, num_sanity_val_steps=steps)
        one.fit(Dropping(), loader(shuffle=True), loader(shuffle=True))
        assert_equal(*(weights(run.module) for run in strategy.runs))
        found.append(weights(one.run.module))
    assert_equal(*found)


# --- several loaders ------------------------------------------------------------------------------


def test_validate_returns_a_dict_for_each_loader():
    net = EvalNet()
    first, second = loader(8), loader(12, 6)
    alone = [trainer().validate(net, one)[0]["val_loss"] for one in (first, second)]
    together = trainer().validate(net, [first, second])
    assert together == [{f"val_loss/dataloader_idx_{i}": alone[i]} for i in range(2)]
    assert alone[0] != alone[1]


def test_without_the_suffix_a_metric_is_one_over_all_loaders():
    net = Logging(
        validate=lambda self, batch, _: self.log("loss", self.loss(batch), add_dataloader_idx=False)
    )
    both = trainer().validate(net, [loader(8), loader(16)])
    firsts, seconds = (trainer().validate(net, loader(n))[0]["loss"] for n in (8, 16))
    assert both[0] == both[1]
    assert both[0]["loss"] == pytest.approx((8 * firsts + 16 * seconds) / 24)


def test_step_and_epoch_values_of_several_loaders_are_in_the_dict_of_theirs():
    net = Logging(
        validate=lambda self, batch, _: self.log(
            "n", float(len(batch[0])), on_step=True, on_epoch=True
        )
    )
    results = trainer().validate(net, [loader(8, 4), loader(12, 6)])
    assert [list(result.values()) for result in results] == [[4.0], [6.0]]


def test_a_value_of_an_epoch_hook_belongs_to_no_loader():
    class Epoch(EvalNet):
        def on_validation_epoch_start(self):
            self.log("started", 1.0)

        def on_validation_epoch_end(self):
            self.log("done", 2.0)

    one = trainer()
    results = one.validate(Epoch(), [loader(8), loader(8)])
    assert {"started": 1.0, "done": 2.0}.items() <= one.callback_metrics.items()
    for result in results:
        assert {"started": 1.0, "done": 2.0}.items() <= result.items()


def test_hooks_get_the_loaders_index():
    class Hooked(EvalNet):
        def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
            self.seen.append(("start", batch_idx, dataloader_idx))

        def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
            self.seen.append(("end", batch_idx, dataloader_idx))

    net = Hooked()
    trainer().validate(net, [loader(4), loader(4)])
    assert net.seen == [(what, 0, i) for i in range(2) for what in ("start", "validate", "end")]


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_eval_mode_without_gradients_and_every_submodule_as_before(command):
    class Moded(EvalNet):
        def __init__(self):
            super().__init__()
            self.frozen, self.drop = nn.BatchNorm1d(3), nn.Dropout()
            self.modes = set()

        def check(self):
            assert not torch.is_grad_enabled()
            self.modes |= {part.training for part in self.modules()}

        def training_step(self, batch, batch_idx):
            assert torch.is_grad_enabled()
            assert [part.training for part in self.modules()] == before
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.check()

        test_step = predict_step = validation_step

    net = Moded()
    net.frozen.eval()
    before = [part.training for part in net.modules()]
    if command == "fit":
        with pytest.warns(UserWarning, match="1 submodules are in eval mode"):
            fit(net, val=loader(), val_check_interval=2, num_sanity_val_steps=1)
    else:
        getattr(trainer(), command)(net, loader())
    assert net.modes == {False}
    assert [part.training for part in net.modules()] == before
    assert torch.is_grad_enabled()


def test_the_wrapped_model_is_in_eval_mode_too():
    class Peeks(EvalNet):
        def training_step(self, batch, batch_idx):
            modes.add(("train", self.trainer.model.training))
            return super().training_step(batch, batch_idx)

        def on_validation_epoch_end(self):
            modes.add(("validate", self.trainer.model.training))

    modes = set()
    on_threads(max_epochs=2)[0].fit(Peeks(), loader(), loader())
    assert modes == {("train", True), ("validate", False)}


def test_modes_are_restored_after_an_error_too():
    class Broken(EvalNet):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

    net = Broken()
    with pytest.raises(ZeroDivisionError):
        trainer().validate(net, loader())
    assert all(part.training for part in net.modules())
    assert torch.is_grad_enabled()


# --- results --------------------------------------------------------------------------------------


def test_test_returns_the_metrics():
    net, one = EvalNet(), trainer()
    (metrics,) = one.test(net, loader())
    with torch.no_grad():
        expected = sum(len(x) * net.loss((x, y)).item() for x, y in loader()) / 24
    assert metrics == {"test_loss": pytest.approx(expected)}
    assert one.callback_metrics == metrics


def test_predict_returns_each_batchs_output():
    net = EvalNet()
    outputs = trainer().predict(net, loader(10))
    assert [len(output) for output in outputs] == [4, 4, 2]
    for output, (x, _) in zip(outputs, loader(10), strict=True):
        assert torch.equal(output, net(x))
        assert output.device.type == "cpu"
        assert not output.requires_grad


def test_predict_keeps_nestings_and_gives_a_list_for_each_loader():
    class Nested(EvalNet):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return {"x": [batch[0]], "from": dataloader_idx}

    outputs = trainer().predict(Nested(), [loader(8), loader(4)])
    assert [[output["from"] for output in one] for one in outputs] == [[0, 0], [1]]
    assert outputs[0][1]["x"][0].shape == (4, 3)


def test_predict_brings_outputs_to_the_cpu():
    class Elsewhere(EvalNet):
        def predict_step(self, batch, batch_idx):
            return {"there": [torch.empty(1, device="meta")]}

    with pytest.raises(
        NotImplementedError, match="copy out of meta"
    ):  # the copy was tried, which no meta tensor allows
        trainer().predict(Elsewhere(), loader(4))


@pytest.mark.parametrize(("command", "loaders"), [("validate", 2), ("test", 1)])
def test_epoch_end_gets_the_outputs_and_may_log(command, loaders):
    class Ends(gt.Module):
        got = None

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            return len(batch[0]), dataloader_idx

        def validation_epoch_end(self, outputs):
            self.got = outputs
            self.log("outputs", float(len(outputs)), add_dataloader_idx=False)

        test_step, test_epoch_end = validation_step, validation_epoch_end

    net = Ends()
    results = getattr(trainer(), command)(net, [loader(6), loader(4)][:loaders])
    assert net.got == ([(4, 0), (2, 0)] if loaders == 1 else [[(4, 0), (2, 0)], [(4, 1)]])
    assert results == [{"outputs": 2.0}] * loaders


def test_step_end_gets_a_list_of_one_output():
    class Ends(gt.Module):
        def validation_step(self, batch, batch_idx):
            return batch[0].sum()

        def validation_step_end(self, outputs):
            assert isinstance(outputs, list)
            assert len(outputs) == 1
            self.log("sum", outputs[0], reduce_fx="sum")

    (metrics,) = trainer().validate(Ends(), loader())
    assert metrics["sum"] == pytest.approx(sum(x.sum().item() for x, _ in loader()), rel=1e-5)


def test_on_validation_end_sees_the_metrics():
    class Sees:
        seen = ()

        @hookimpl
        def on_validation_end(self, run):
            self.seen = (*self.seen, (run.stage, run.metrics["val_loss"]))

    class Own(EvalNet):
        own = ()

        def on_validation_end(self):
            self.own = (*self.own, self.trainer.callback_metrics["val_loss"])

    net, sees = Own(), Sees()
    fit(net, val=loader(), num_sanity_val_steps=1, plugins=[sees], max_epochs=2)
    assert [stage for stage, _ in sees.seen] == ["sanity_check", "validate", "validate"]
    assert net.own == tuple(loss for _, loss in sees.seen)
    assert len(set(net.own)) == 3


# --- missing loaders and steps --------------------------------------------------------------------


def test_validation_step_without_a_loader_is_no_error():
    times = Times()
    fit(EvalNet(), num_sanity_val_steps=2, plugins=[times])
    assert times.steps == []


@pytest.mark.parametrize(
    ("command", "method"), [("validate", "val"), ("test", "test"), ("predict", "predict")]
)
def test_no_loader_is_an_error_that_names_the_method(command, method):
    with pytest.raises(UsageError, match=f"{method}_dataloader"):
        getattr(trainer(), command)(EvalNet())


def test_no_step_method_is_an_error_that_names_it():
    with pytest.raises(UsageError, match="Net has no test_step"):
        trainer().test(Net(), loader())


# --- inference_mode -------------------------------------------------------------------------------


class Modes(EvalNet):
    """Records in each step whether it runs in inference mode."""

    def validation_step(self, batch, batch_idx):
        self.seen.append(torch.is_inference_mode_enabled())
        assert not torch.is_grad_enabled()

    test_step = predict_step = validation_step

    def training_step(self, batch, batch_idx):
        assert not torch.is_inference_mode_enabled()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("inference_mode", [False, True])
def test_evaluation_is_in_inference_mode_only_if_it_is_chosen(inference_mode):
    net = Modes()
    one = trainer(num_sanity_val_steps=1, inference_mode=inference_mode)
    one.fit(net, loader(), loader())
    for command in (one.validate, one.test, one.predict):
        command(net, loader())
    assert set(net.seen) == {inference_mode}


class Keeps(Net):
    """Keeps a tensor of the first step that needs it, as attention masks are kept."""

    scale = None

    def loss(self, batch):
        if self.scale is None:
            self.scale = torch.ones(1, 1) * 2
        return (super().loss(batch) * self.scale).sum()

    def validation_step(self, batch, batch_idx):
        self.loss(batch)


def test_a_tensor_that_an_evaluation_keeps_can_be_trained_with_by_default():
    fit(Keeps(), val=loader(), num_sanity_val_steps=1)


class Differentiates(Net):
    """Needs gradients to validate."""

    def validation_step(self, batch, batch_idx):
        with torch.inference_mode(False), torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            gradient = torch.autograd.grad(self(x).sum(), x)[0]
        self.log("gradient", gradient.norm())


def test_a_module_may_compute_gradients_in_inference_mode():
    one = fit(Differentiates(), val=loader(), inference_mode=True)
    assert one.callback_metrics["gradient"] > 0


def test_a_plugin_that_changes_weights_around_an_evaluation():
    options = {"val": loader(), "max_epochs": 2, "plugins": ["ema"]}
    plain, inference = Logging(), Logging()
    inference.load_state_dict(plain.state_dict())
    fit(plain, **options)
    fit(inference, inference_mode=True, **options)
    assert_equal(plain, weights(inference))


# --- the default predict_step ---------------------------------------------------------------------


def test_without_a_predict_step_predict_calls_the_module_with_the_batch():
    net = Net()
    batches = [batch[0] for batch in loader()]
    outputs = trainer().predict(net, batches)
    with torch.no_grad():
        assert all(map(torch.equal, outputs, [net(batch) for batch in batches]))
    assert len(trainer().predict(net, [loader_of(batches), loader_of(batches)])) == 2


def loader_of(batches):
    return torch.utils.data.DataLoader(torch.cat(batches), batch_size=4)


def test_a_batch_with_targets_explains_the_default():
    with pytest.raises(TypeError) as caught:
        trainer().predict(Net(), loader())
    fix = "Fix: def predict_step(self, batch, batch_idx): return self(batch[0])"
    assert f"Net has no predict_step, so its forward got the whole batch, a list of 2. {fix}" in (
        " ".join(caught.value.__notes__)
    )


def test_predict_needs_a_predict_step_or_a_forward_before_anything_starts():
    class Neither(gt.Module):
        def training_step(self, batch, batch_idx): ...

    one = trainer()
    with pytest.raises(UsageError, match="Neither has neither predict_step nor forward"):
        one.predict(Neither(), loader())
    with pytest.raises(UsageError, match="Neither has neither"):
        one.check(Neither, "predict")


def test_an_own_predict_step_needs_no_forward_and_may_call_the_default():
    class Own(gt.Module):
        def predict_step(self, batch):
            return batch[0]

    assert len(trainer().predict(Own(), loader())) == 6

    class Calls(Net):
        def predict_step(self, batch, batch_idx):
            return super().predict_step(batch[0], batch_idx)

    assert trainer().predict(Calls(), loader())[0].shape == (4, 1)
