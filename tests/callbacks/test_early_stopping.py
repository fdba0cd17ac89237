"""EarlyStopping: training ends when a metric stops improving."""

import pytest
from small_models import Logging, fit, loader, trainer as make_trainer

from geartrain import TrainingError
from geartrain.callbacks import EarlyStopping, EarlyStoppingReason
from geartrain.errors import nearest

NAN, INF = float("nan"), float("inf")


def run_on(values, val=True, every=1.0, **options):
    """Train with a metric that takes ``values``, one per check; return callback and trainer."""
    left, now = list(values), []

    def logs(module, batch, batch_idx):
        if batch_idx == 0:
            now[:] = [left.pop(0) if len(left) > 1 else left[0]]
        module.log("metric", now[0], on_step=False, on_epoch=True)

    options = {"monitor": "metric", **options}
    names = ("log_every_n_steps", "check_val_every_n_epoch", "max_epochs", "num_sanity_val_steps")
    names += ("output",)
    of_trainer = {name: options.pop(name) for name in names if name in options}
    callback = EarlyStopping(**options)
    module = Logging(validate=logs) if val else Logging(train=logs)
    of_trainer = {"max_epochs": 12, "val_check_interval": every, **of_trainer}
    return callback, fit(module, val=loader(4) if val else None, plugins=[callback], **of_trainer)


@pytest.mark.parametrize(
    ("values", "options", "epochs", "reason"),
    [
        ([5, 4, 3, 3, 3, 3, 3], {}, 6, "metric was not better than 3 for 3 checks"),
        ([5, 4, 5, 3, 3, 3], {"patience": 2}, 6, "not better than 3 for 2 checks"),
        ([1, 2, 3, 2, 2, 2], {"mode": "max"}, 6, "not better than 3"),
        ([1, 2, 3, 2, 2, 2], {"mode": "min", "val": False}, 4, "not better than 1"),
        ([5, 4.9, 4.8, 4.7], {"min_delta": 0.5}, 4, "not better than 5"),
        ([5, 5.1, 5.2, 5.3], {"min_delta": 0.5, "mode": "max"}, 4, "not better than 5"),
        ([5, 4.4, 3.8, 3.2, 3.2, 3.2, 3.2], {"min_delta": 0.5}, 7, "not better than 3.2"),
        ([5, 4, NAN], {}, 3, "metric = nan is not finite"),
        ([5, 4, INF], {"mode": "max"}, 3, "is not finite"),
        ([5, NAN, 4, NAN, NAN, NAN], {"check_finite": False}, 6, "not better than 4"),
        ([5, 1], {"stopping_threshold": 2.0}, 2, "1 is better than stopping_threshold=2.0"),
        ([5, 11], {"stopping_threshold": 10.0, "mode": "max"}, 2, "11 is better than stop"),
        ([5, 11], {"divergence_threshold": 10.0}, 2, "11 is worse than divergence_threshold=10.0"),
        ([5, -11], {"divergence_threshold": -10.0, "mode": "max"}, 2, "-11 is worse than div"),
        (list(range(20, 0, -1)), {}, 12, ""),
    ],
)
def test_training_ends_after_the_right_epoch(values, options, epochs, reason, capsys):
    callback, trainer = run_on(values, **options)
    assert trainer.current_epoch == epochs
    assert trainer.global_step == 6 * epochs
    assert bool(callback.stopping_reason_message) == bool(reason)
    assert reason in (callback.stopping_reason_message or "")
    assert reason in capsys.readouterr().err
    assert callback.stopped_epoch == (epochs - 1 if epochs < 12 else 0)


@pytest.mark.parametrize(
    ("values", "options", "reason"),
    [
        ([5], {}, "PATIENCE_EXHAUSTED"),
        ([NAN], {}, "NON_FINITE_METRIC"),
        ([1], {"stopping_threshold": 2.0}, "STOPPING_THRESHOLD"),
        ([3], {"divergence_threshold": 2.0}, "DIVERGENCE_THRESHOLD"),
        ([5], {"max_epochs": 2}, "NOT_STOPPED"),
    ],
)
def test_the_reason_is_a_value_to_compare(values, options, reason):
    callback, _ = run_on(values, **options)
    assert callback.stopping_reason is EarlyStoppingReason[reason]
    module = Logging(validate=lambda self, *_: self.log("metric", -1000.0))
    callback.divergence_threshold = callback.stopping_threshold = None
    fit(module, val=loader(), plugins=[callback])  # the next fit has a new one
    assert callback.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert callback.stopping_reason_message is None


def test_a_fit_that_resumes_where_training_ended_has_the_reason_again(tmp_path):
    def go(resumes):
        callback = EarlyStopping("metric", patience=2)
        module = Logging(validate=lambda self, *_: self.log("metric", 5.0))
        one = make_trainer(callbacks=[callback], max_epochs=9, output=tmp_path / "run")
        one.fit(module, loader(), loader(), ckpt_path="last" if resumes else None)
        return one.current_epoch, callback.stopping_reason, callback.stopping_reason_message

    first = go(False)
    assert first[:2] == (3, EarlyStoppingReason.PATIENCE_EXHAUSTED)
    assert go(True) == first


def test_verbose_prints_each_improvement(capsys):
    run_on([5, 4, 6], max_epochs=3, verbose=True)
    assert "metric went from 5 to 4" in capsys.readouterr().err


def test_the_sanity_check_does_not_count_as_a_check():
    callback, _ = run_on([1, 5, 5], every=3, max_epochs=1, num_sanity_val_steps=2)
    assert callback.best_score == 5


def test_validation_within_an_epoch_ends_it_at_once():
    """Checks happen after steps 2, 4, 6 and 8; the last is the third without improvement."""
    assert run_on([5], every=2)[1].global_step == 8


@pytest.mark.parametrize("flush", [1, 50])
def test_a_training_metric_has_the_value_of_the_step_before_the_validation(flush):
    def train(module, batch, batch_idx):
        module.log("loss", [9.0, 5.0, 0.0, 6.0, 0.0, 7.0][batch_idx])

    stopping = EarlyStopping("loss", patience=2)
    options = {"plugins": [stopping], "val_check_interval": 2, "log_every_n_steps": flush}
    ended = fit(Logging(train, validate=lambda *_: None), val=loader(4), **options)
    assert (stopping.best_score, ended.global_step) == (5.0, 6)


def test_an_epoch_without_the_metric_does_not_count_as_a_check():
    options = {"check_val_every_n_epoch": 2, "check_on_train_epoch_end": True, "strict": False}
    with pytest.warns(UserWarning, match="monitors 'metric', which was not logged"):
        _, trainer = run_on([5], patience=2, **options)
    assert trainer.current_epoch == 6


def test_only_epochs_with_validation_are_checked():
    _, trainer = run_on([5], check_val_every_n_epoch=2, patience=1)
    assert trainer.current_epoch == 4


def test_after_each_epoch_training_metrics_can_be_monitored():
    module = Logging(
        train=lambda self, batch, i: self.log("train", 5.0, on_step=False, on_epoch=True),
        validate=lambda self, batch, i: None,
    )
    stopping = EarlyStopping("train", patience=1)
    assert fit(module, val=loader(), max_epochs=9, plugins=[stopping]).current_epoch == 2


def test_a_metric_that_was_not_logged_is_an_error_that_names_the_nearest():
    message = (
        r"callbacks\[early_stopping\].*'metrik', which was not logged. Did you mean 'metric'\?"
    )
    with pytest.raises(TrainingError, match=message + " Logged: metric."):
        run_on([5], monitor="metrik")


def test_a_metric_of_several_loaders_is_named_by_the_first():
    logged = ["train_loss", "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"]
    assert nearest("val_loss", logged) == "Did you mean 'val_loss/dataloader_idx_0'?"


def test_not_strict_it_warns_once_and_continues():
    with pytest.warns(UserWarning, match="metrik") as warned:
        _, trainer = run_on([5], monitor="metrik", strict=False, max_epochs=3)
    assert trainer.current_epoch == 3
    assert len(warned) == 1


def test_a_fit_that_resumes_continues_the_count(tmp_path):
    first, _ = run_on([5, 4, 4], max_epochs=3, patience=3, output=tmp_path)
    state = first.state_dict()
    assert (state["wait_count"], state["best_score"]) == (1, 4)
    again = EarlyStopping("metric", patience=3)
    module = Logging(validate=lambda self, batch, i: self.log("metric", 4.0))
    resumed = make_trainer(max_epochs=9, plugins=[again], output=tmp_path)
    resumed.fit(module, loader(), loader(), ckpt_path="last")
    assert resumed.current_epoch == 5


def test_the_next_fit_is_not_ended_by_the_last_ones_stop():
    callback, one = run_on([5], patience=1)
    assert one.current_epoch == 2
    callback.patience = 2
    one.fit(Logging(validate=lambda self, *_: self.log("metric", 7.0)), loader(), loader())
    assert (one.current_epoch, callback.best_score) == (3, 7)
