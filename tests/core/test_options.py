"""The Trainer's arguments for the loop: wrong values, and Lightning's old names."""

import inspect
import json
import math
from dataclasses import fields
from datetime import timedelta

import pytest

import geartrain as gt
from geartrain import UsageError
from geartrain.options import Options
from geartrain.planning.components import _Choices
from geartrain_port.names import OF_TRAINER_CALL

LIMITS = ["limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"]


def options(**given):
    return gt.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "strategy": "single",
            "enable_progress_bar": False,
            **given,
        }
    ).plan.options


def refused(*words, **given):
    with pytest.raises(UsageError) as caught:
        options(**given)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def test_the_trainers_signature_repeats_options_and_arguments():
    parameters = {
        name: one
        for name, one in inspect.signature(gt.Trainer).parameters.items()
        if name != "unknown"
    }
    defaults = {one.name: one.default for cls in (Options, _Choices) for one in fields(cls)}
    written = {name: one.default for name, one in parameters.items()}
    assert written == {**defaults, "max_epochs": None, "fast_dev_run": False}


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("max_epochs", -1),
        ("max_steps", -1),
        ("num_sanity_val_steps", -1),
        ("accumulate_grad_batches", 1),
        ("log_every_n_steps", 1),
        ("check_val_every_n_epoch", 1),
    ],
)
def test_whole_numbers_have_a_minimum(name, least):
    assert getattr(options(**{name: least}), name) == least
    for value in (least - 1, 1.0, "2", True):
        refused(name, repr(value), "whole number", f"at least {least}", **{name: value})


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_numbers_of_batches_or_fractions(name):
    for value in (None, 0, 1000, 0.0, 0.25, 1.0):
        assert getattr(options(**{name: value}), name) == value
    for value in (-1, -0.1, 1.1, math.nan, True, "1"):
        refused(name, repr(value), "0.0", "1.0", **{name: value})


def test_val_check_interval_is_a_fraction_or_a_number_of_batches_above_zero():
    for value in (1.0, 0.25, 1, 100):
        assert options(val_check_interval=value).val_check_interval == value
    for value in (0, -1, 1.5, -0.5, math.nan, True, "one", None):
        refused("val_check_interval", repr(value), val_check_interval=value)


def test_counting_across_epochs_needs_a_number_of_batches():
    assert (
        options(check_val_every_n_epoch=None, val_check_interval=7).check_val_every_n_epoch is None
    )
    for interval in ({}, {"val_check_interval": 0.5}):
        refused(
            "check_val_every_n_epoch=None",
            "val_check_interval",
            "whole number",
            check_val_every_n_epoch=None,
            **interval,
        )


@pytest.mark.parametrize("value", [None, 1, 0.5, math.inf])
def test_gradient_clip_val_takes_numbers_and_none(value):
    assert options(gradient_clip_val=value).gradient_clip_val == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gradient_clip_val": 0}, "gradient_clip_val=0"),
        ({"gradient_clip_val": -1}, "gradient_clip_val=-1"),
        ({"gradient_clip_val": math.nan}, "gradient_clip_val=nan"),
        ({"gradient_clip_val": "1.0"}, "gradient_clip_val='1.0'"),
        ({"gradient_clip_algorithm": "Norm"}, "gradient_clip_algorithm='Norm'"),
        ({"gradient_clip_algorithm": None}, "'norm' or 'value'"),
        ({"deterministic": "yes"}, "deterministic='yes'"),
        ({"deterministic": 2}, "'warn'"),
        ({"fast_dev_run": "yes"}, "fast_dev_run='yes'"),
        ({"fast_dev_run": None}, "fast_dev_run=None"),
        ({"fast_dev_run": -1}, "fast_dev_run=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, f"seed={2**32}"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"inference_mode": "yes"}, "inference_mode='yes'"),
        ({"detect_anomaly": "yes"}, "True or False"),
        ({"sync_batchnorm": "yes"}, "True or False"),
        ({"overfit_batches": 1.5}, "overfit_batches="),
        ({"overfit_batches": True}, "overfit_batches="),
        ({"overfit_batches": 1, "limit_train_batches": 2}, "limit_train_batches"),
        ({"overfit_batches": 1, "limit_val_batches": 2}, "Fix: give one"),
        ({"min_epochs": 2000}, "min_epochs=2000 is more than max_epochs=1000"),
        ({"val_check_interval": "30s"}, "val_check_interval='30s'"),
        ({"val_check_interval": "00:00:00:00"}, "Fix: "),
        ({"val_check_interval": {"hors": 1}}, "Fix: "),
        ({"val_check_interval": timedelta(0)}, "Fix: "),
    ],
)
def test_wrong_values_are_refused(given, words):
    refused(next(iter(given)), words, **given)


# --- options that follow from others --------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "epochs", "steps"),
    [
        ({}, 1000, -1),
        ({"max_steps": 5}, -1, 5),
        ({"max_epochs": 2, "max_steps": 5}, 2, 5),
        ({"max_epochs": -1}, -1, -1),
    ],
)
def test_epochs_have_a_default_only_if_steps_have_no_end(given, epochs, steps):
    made = options(**given)
    assert (made.max_epochs, made.max_steps) == (epochs, steps)


@pytest.mark.parametrize(("given", "tries"), [(True, 1), (3, 3)])
def test_fast_dev_run_limits_everything(given, tries):
    made = options(
        fast_dev_run=given,
        max_epochs=9,
        limit_val_batches=7,
        val_check_interval=0.1,
        num_sanity_val_steps=2,
    )
    assert (made.fast_dev_run, made.max_epochs, made.max_steps) == (tries, 1, tries)
    assert [getattr(made, name) for name in LIMITS] == [tries] * 4
    assert (made.val_check_interval, made.num_sanity_val_steps) == (1.0, 0)


def test_each_stage_has_its_own_limit():
    made = options(**{name: number for number, name in enumerate(LIMITS)})
    assert [made.limit(stage) for stage in ("train", "validate", "test", "predict")] == [0, 1, 2, 3]


def test_sanity_check_is_limited_by_its_own_steps():
    assert options(num_sanity_val_steps=2, limit_val_batches=9).limit("sanity_check") == 2
    assert options(num_sanity_val_steps=-1).limit("sanity_check") is None


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_the_least_is_not_more_than_the_most(unit):
    assert getattr(options(**{f"min_{unit}": 3, f"max_{unit}": 3}), f"min_{unit}") == 3
    assert getattr(options(**{f"min_{unit}": 5000, f"max_{unit}": -1}), f"min_{unit}") == 5000
    refused(f"min_{unit}=4 is more than max_{unit}=3", **{f"min_{unit}": 4, f"max_{unit}": 3})
    refused(f"min_{unit}=-1", **{f"min_{unit}": -1})


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("10:00:00:00", 864000),
        ("00:00:30:00", 1800),
        (timedelta(minutes=2), 120),
        ({"minutes": 5, "seconds": 1}, 301),
    ],
)
def test_val_check_interval_may_be_a_time(given, seconds):
    assert options(val_check_interval=given).val_check_interval == timedelta(seconds=seconds)


@pytest.mark.parametrize(("given", "read"), [("2", 2), ("0.5", 0.5), ("1.0", 1.0)])
def test_text_of_the_command_line_may_be_a_number(given, read):
    found = options(val_check_interval=given).val_check_interval
    assert (found, type(found)) == (read, type(read))


def test_a_time_in_the_plan_is_text():
    made = gt.Trainer(devices=1, val_check_interval={"hours": 2}, enable_progress_bar=False)
    assert json.loads(json.dumps(made.plan.as_dict()))["options"]["val_check_interval"] == "2:00:00"


def test_overfit_batches_limits_training_and_validation():
    made = options(overfit_batches=2, limit_test_batches=9)
    stages = ("train", "validate", "test", "predict")
    assert [made.limit(stage) for stage in stages] == [2, 2, 9, None]
    assert options(overfit_batches=0.0).limit("train") is None


def test_fast_dev_run_needs_no_other_limits():
    made = options(fast_dev_run=2, overfit_batches=1, min_epochs=5, min_steps=9)
    assert (made.min_epochs, made.min_steps, made.overfit_batches) == (None, None, 0.0)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gpus", "devices="),
        ("auto_select_gpus", "find_usable_cuda_devices"),
        ("enable_checkpointing", "ModelCheckpoint"),
        ("resume_from_checkpoint", "ckpt_path="),
        ("tpu_cores", "tpu"),
    ],
)
def test_lightnings_old_names_are_answered_with_the_new_one(old, new):
    refused(repr(old), new, **{old: 1})


def test_a_strategy_that_was_an_accelerator_is_in_the_answer():
    assert "strategy='dp'" in refused("accelerator='dp' is a strategy", accelerator="dp")
    assert "strategy='ddp' with accelerator='cpu'" in refused("'ddp_cpu'", accelerator="ddp_cpu")


def test_each_unknown_argument_is_answered():
    message = refused("'gpus'", "devices=", gpus=2, distributed_backend="dp", max_epoch=1)
    assert "'distributed_backend'. Write: strategy=" in message
    assert "'max_epoch'. Did you mean 'max_epochs'?" in message


def test_no_argument_is_called_renamed():
    assert not set(OF_TRAINER_CALL) & set(inspect.signature(gt.Trainer).parameters)


@pytest.mark.parametrize(("typed", "meant"), [("max_epoch", "max_epochs"), ("Devices", "devices")])
def test_misspelling_gets_the_nearest_argument(typed, meant):
    refused(f"'{typed}'", f"Did you mean '{meant}", **{typed: 1})


@pytest.mark.parametrize("typed", ["retrun", "unknwon", "slef"])
def test_only_arguments_are_suggested(typed):
    message = refused(repr(typed), **{typed: 1})
    assert not any(
        f"{name!r}?" in message or f" {name}," in message for name in ("return", "unknown", "self")
    )
