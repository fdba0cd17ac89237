"""Options of the callbacks that are refused: when the object is made, and before a run starts."""

import math

import pytest
import torch
from small_models import Net, fit

from geartrain import UsageError
from geartrain.callbacks import (
    EMA,
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    NaNGuard,
    Norms,
    PredictionWriter,
    StochasticWeightAveraging,
    Throughput,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)

SWA = StochasticWeightAveraging
DURATION = r"duration=.*Fix: 'DD:HH:MM:SS'"
PER_STEPS = {"every_n_train_steps": 2}


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (BackboneFinetuning, {"unfreeze_backbone_at_epoch": -1}, "backbone_finetuning: unfreeze"),
        (BackboneFinetuning, {"unfreeze_backbone_at_epoch": 1.0}, "unfreeze_backbone_at_epoch=1.0"),
        (BackboneFinetuning, {"backbone_initial_ratio_lr": 0}, "backbone_initial_ratio_lr=0"),
        (BackboneFinetuning, {"backbone_initial_lr": -1.0}, "backbone_initial_lr=-1.0"),
        (BasePredictionWriter, {}, r"needs write_on_batch_end\. Fix: override it"),
        (EarlyStopping, {"monitor": "metric", "mode": "auto"}, "mode"),
        (EarlyStopping, {"monitor": "metric", "patience": -1}, "patience"),
        (EarlyStopping, {"monitor": "metric", "patience": 1.5}, "patience"),
        (EarlyStopping, {"monitor": "metric", "min_delta": -0.1}, "min_delta"),
        (EMA, {"decay": 1.1}, "decay"),
        (EMAWeightAveraging, {"decay": True}, "decay=True must lie between"),
        (EMAWeightAveraging, {"update_every_n_steps": 0}, "update_every_n_steps=0 .*least 1"),
        (EMAWeightAveraging, {"update_every_n_steps": None}, "update_every_n_steps=None"),
        (EMAWeightAveraging, {"update_starting_at_step": -1}, "update_starting_at_step=-1"),
        (EMAWeightAveraging, {"update_starting_at_epoch": 1.5}, "update_starting_at_epoch=1.5"),
        (WeightAveraging, {"device": "gpu7"}, "device='gpu7' is unknown. Fix: leave it out"),
        (WeightAveraging, {"avg_fn": print, "multi_avg_fn": print}, "both given. Fix: leave one"),
        (EMA, {"decay": -0.1}, "decay"),
        (EMA, {"every": 0}, "every"),
        (EMA, {"start_step": -1}, "start_step"),
        *(
            (GradientAccumulationScheduler, {"scheduling": wrong}, "accumulation_scheduler: ")
            for wrong in ({}, 3, {"0": 2}, {0: 0}, {-1: 2}, {0: True})
        ),
        (LambdaCallback, {}, "has no function"),
        (LambdaCallback, {"on_train_epoch_ends": print}, "Did you mean 'on_train_epoch_end"),
        (LambdaCallback, {"on_epoch_end": print}, "Use instead: on_train_epoch_end"),
        (LambdaCallback, {"on_fit_end": 3}, "on_fit_end=3 is not a function. Fix: "),
        (LearningRateMonitor, {"logging_interval": "batch"}, "'step', 'epoch' or None"),
        (ModelCheckpoint, {"mode": "auto"}, "model_checkpoint.*mode='auto'"),
        (ModelCheckpoint, {"save_top_k": -2}, "save_top_k=-2"),
        (ModelCheckpoint, {"save_top_k": True}, "save_top_k=True"),
        (ModelCheckpoint, {"save_top_k": 3, "monitor": None}, "needs a metric"),
        (ModelCheckpoint, {"save_top_k": 0}, "saves nothing"),
        (ModelCheckpoint, {"every_n_epochs": 0}, "every_n_epochs=0"),
        (ModelCheckpoint, {"every_n_train_steps": 0}, "every_n_train_steps=0"),
        (ModelCheckpoint, {**PER_STEPS, "every_n_epochs": 1}, "leave one out"),
        (ModelCheckpoint, {**PER_STEPS, "save_on_train_epoch_end": True}, "leave one out"),
        (ModelCheckpoint, {"filename": ""}, "is not a name"),
        (ModelCheckpoint, {"filename": "../{epoch}"}, "leads out of the folder. Fix: dirpath"),
        (ModelCheckpoint, {"filename": "/tmp/{epoch}"}, "leads out of the folder"),
        (ModelCheckpoint, {"filename": "{epoch"}, "is not a name"),
        (ModelCheckpoint, {"filename": "{}"}, "is not a name"),
        (ModelCheckpoint, {"filename": "{epoch:.zf}"}, "cannot be written"),
        (ModelCheckpoint, {"filename": "{val_loss:d}"}, "cannot be written"),
        (ModelCheckpoint, {"filename": "last", "save_last": True}, "another name"),
        (ModelCheckpoint, {"save_last": "links"}, "save_last='links'. Fix: True or 'link'"),
        (ModelSummary, {"max_depth": -2}, "max_depth"),
        (ModelSummary, {"max_depth": True}, "max_depth"),
        (NaNGuard, {"action": "ignore"}, "action"),
        (NaNGuard, {"check": "weights"}, "check"),
        (Norms, {"gradients": False}, "gradients"),
        (Norms, {"every": 0}, "every"),
        (Norms, {"every": True}, "every"),
        (PredictionWriter, {"output_dir": "s3://bucket/x"}, "is a URL"),
        (PredictionWriter, {"output_dir": "x", "write_interval": "step"}, "'step'. Fix: 'batch'"),
        (SWA, {"swa_lrs": 0.0}, "swa: swa_lrs="),
        (SWA, {"swa_lrs": []}, "swa_lrs="),
        (SWA, {"swa_lrs": "1"}, "swa_lrs="),
        (SWA, {"swa_lrs": 0.1, "swa_epoch_start": 0}, "swa_epoch_start="),
        (SWA, {"swa_lrs": 0.1, "swa_epoch_start": 1.5}, "swa_epoch_start="),
        (SWA, {"swa_lrs": 0.1, "annealing_epochs": -1}, "annealing_epochs="),
        (SWA, {"swa_lrs": 1.0, "annealing_strategy": "x"}, "strategy='x'"),
        (Throughput, {"tokens": 0}, "tokens"),
        (Throughput, {"tokens": "many"}, "tokens"),
        (Throughput, {"tokens": True}, "tokens"),
        (Throughput, {"peak_flops": 0}, "peak_flops"),
        (ThroughputMonitor, {"batch_size_fn": 4}, "batch_size_fn=4 is not a function. Fix: a fun"),
        (ThroughputMonitor, {"batch_size_fn": len, "length_fn": 8}, "length_fn=8 is not a fun"),
        (ThroughputMonitor, {"batch_size_fn": len, "window_size": 0}, "window_size=0 must be"),
        (ThroughputMonitor, {"batch_size_fn": len, "available_flops": 0}, "available_flops=0"),
        (Timer, {"duration": 1, "interval": "batch"}, "'step' or 'epoch'"),
        *(
            (Timer, {"duration": wrong}, DURATION)
            for wrong in ("1:00", "soon", "", True, None, {"hors": 1}, {"hours": "x"}, 0, math.nan)
        ),
    ],
)
def test_wrong_options(cls, options, message):
    with pytest.raises(UsageError, match=message):
        cls(**{"monitor": "val_loss", **options} if cls is ModelCheckpoint else options)


class Manual(Net):
    automatic_optimization = False


ACCUMULATION = GradientAccumulationScheduler({0: 2})


@pytest.mark.parametrize(
    ("plugin", "module", "options", "message"),
    [
        (BackboneFinetuning(1), Net, {}, r"Net has no module 'backbone'\. Fix: self.backbone"),
        (EarlyStopping("x", check_on_train_epoch_end=False), Net, {}, "the run has none"),
        (ACCUMULATION, Net, {"accumulate_grad_batches": 3}, r"it is 3 too\. Fix: give one"),
        (ACCUMULATION, Manual, {}, "would do nothing: the module optimizes manually"),
        (
            ModelCheckpoint(dirpath="x", save_on_train_epoch_end=False),
            Net,
            {},
            "on_train_epoch_end",
        ),
        (ModelCheckpoint(), Net, {}, r"no place to write.*dirpath.*--output"),
        (ModelCheckpoint(dirpath=__file__), Net, {}, "is not a folder"),
        (NaNGuard(check="gradients"), Net, {"precision": "16-mixed"}, "scaler skips those steps"),
        (NaNGuard("skip"), lambda: Net(torch.optim.LBFGS), {}, "needs a closure"),
        (SWA(0.1), Net, {"max_epochs": -1, "max_steps": 3}, "of max_epochs, which has no end"),
        (SWA(0.1), Manual, {}, "the module optimizes manually"),
        (SWA([0.1, 0.2]), Net, {}, "swa_lrs has 2 rates, and the optimizer 1 groups"),
    ],
)
def test_runs_that_contradict_an_option(plugin, module, options, message):
    with pytest.raises(UsageError, match=message):
        fit(module(), plugins=[plugin], **options)
