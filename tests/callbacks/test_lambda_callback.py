"""LambdaCallback: functions in place of methods."""

import pytest
from small_models import fit, loader

from geartrain import UsageError
from geartrain.callbacks import LambdaCallback


def test_each_function_is_called_as_the_method_of_its_name():
    calls = []
    fit(
        val=loader(),
        callbacks=[
            LambdaCallback(
                setup=lambda trainer, module, stage: calls.append(stage),
                on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: calls.append(
                    batch_idx
                ),
                on_validation_batch_end=lambda *arguments: calls.append(len(arguments)),
            )
        ],
    )
    assert calls == ["fit", *range(6)]


def test_it_needs_a_validation_step_to_hear_of_validation():
    from small_models import EvalNet

    calls = []
    fit(
        EvalNet(),
        val=loader(),
        callbacks=[LambdaCallback(on_validation_batch_end=lambda *a: calls.append(len(a)))],
    )
    assert calls == [6] * 6


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({}, "has no function"),
        ({"on_train_epoch_ends": print}, r"never be called\. Did you mean 'on_train_epoch_end"),
        ({"on_epoch_end": print}, "Use instead: on_train_epoch_end"),
        ({"on_fit_end": 3}, "on_fit_end=3 is not a function. Fix: "),
    ],
)
def test_mistakes(functions, message):
    with pytest.raises(UsageError, match=message):
        LambdaCallback(**functions)
