"""What a Trainer was told about the loop, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from geartrain.errors import UsageError, nearest

#: Arguments of Lightning's Trainer that geartrain spells in another way -> what to write.
RENAMED = {
    "gpus": "devices=N with accelerator='gpu' (or 'cuda')",
    "num_gpus": "devices=N with accelerator='gpu'",
    "tpu_cores": "nothing: no geartrain distribution drives TPUs",
    "num_processes": "devices=N with accelerator='cpu'",
    "distributed_backend": "strategy=NAME",
    "replace_sampler_ddp": "use_distributed_sampler=...",
    "auto_select_gpus": "devices=find_usable_cuda_devices(k), or the cuda accelerator's auto_select option",
    "default_root_dir": "output=DIR",
    "enable_checkpointing": "nothing: output=DIR writes last.ckpt, plugins=[ModelCheckpoint(...)] the best, and else nothing is written",
    "checkpoint_callback": "plugins=[ModelCheckpoint(...)] of geartrain.callbacks",
    "weights_save_path": "output=DIR",
    "logger": "plugins=[...], and output=DIR for metrics.jsonl",
    "progress_bar_refresh_rate": "enable_progress_bar=True or False",
    "auto_lr_find": "geartrain.tuning.Tuner(trainer).lr_find(model), or geartrain tune lr",
    "auto_scale_batch_size": "geartrain.tuning.Tuner(trainer).scale_batch_size(model), or geartrain tune batch-size",
    "truncated_bptt_steps": "nothing: split the sequence in training_step",
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fit",
    "resume_from_checkpoint": "ckpt_path=PATH of fit",
    "enable_model_summary": "plugins=['model_summary']; without it nothing is printed",
    "weights_summary": "plugins=['model_summary']; without it nothing is printed",
    "process_position": "nothing: there is one progress bar",
    "ipus": "nothing: no geartrain distribution drives IPUs",
    "log_gpu_memory": "plugins=['device_stats']",
    "track_grad_norm": "plugins=['norms']",
    "terminate_on_nan": "plugins=['nan_guard']",
    "flush_logs_every_n_steps": "log_every_n_steps=N",
    "min_epochs": "nothing: train without EarlyStopping, or give it more patience",
    "min_steps": "nothing: train without EarlyStopping, or give it more patience",
    "overfit_batches": "limit_train_batches=N and a loader without shuffling",
    "benchmark": "accelerator_options={'cudnn_benchmark': True}",
    "inference_mode": "nothing: evaluation runs under torch.no_grad()",
    "profiler": "torch.profiler.profile() around fit, or plugins=['throughput']",
    "detect_anomaly": "torch.autograd.set_detect_anomaly(True) before fit, or plugins=['nan_guard']",
    "barebones": "enable_progress_bar=False: nothing else is on by default",
    "reload_dataloaders_every_n_epochs": "nothing: a loader is made once; let its dataset or sampler change with the epoch",
    "enable_autolog_hparams": "nothing: loggers are given the hyperparameters, and without a logger nobody is",
    "model_registry": "nothing: upload what the run wrote",
    "prepare_data_per_node": "nothing: prepare_data is called once a node",
    "amp_backend": "precision='16-mixed': torch's own is the only one",
    "amp_level": "precision='16-mixed': torch's own is the only one",
    "move_metrics_to_cpu": "nothing: outputs of training_epoch_end are detached, and those of predict on the CPU",
    "multiple_trainloader_mode": "nothing: combine the loaders in train_dataloader",
    "stochastic_weight_avg": "plugins=['ema'], which averages exponentially",
}


#: Strategies that were accelerators in Lightning 1.4 -> what to write.
_WERE_ACCELERATORS = {name: f"strategy={name!r}" for name in ("dp", "ddp", "ddp2", "ddp_spawn", "horovod")} | {
    "ddp_cpu": "strategy='ddp' with accelerator='cpu'"
}


@dataclass(frozen=True, slots=True)
class Options:
    """The loop's options, as :class:`geartrain.Trainer` documents them."""

    max_epochs: int
    max_steps: int
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str
    log_every_n_steps: int
    enable_progress_bar: bool
    use_distributed_sampler: bool
    fast_dev_run: int
    seed: int | None
    deterministic: bool | str

    def __post_init__(self) -> None:
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"):
            _check_limit(name, getattr(self, name))
        _check_limit("val_check_interval", self.val_check_interval, least=1)
        if not self.val_check_interval:
            raise UsageError(f"val_check_interval={self.val_check_interval!r}: a fraction of an epoch above 0.0, or a number of batches.")
        _check_least("max_epochs", self.max_epochs, -1)
        _check_least("max_steps", self.max_steps, -1)
        _check_least("num_sanity_val_steps", self.num_sanity_val_steps, -1)
        _check_least("accumulate_grad_batches", self.accumulate_grad_batches, 1)
        _check_least("log_every_n_steps", self.log_every_n_steps, 1)
        _check_least("fast_dev_run", self.fast_dev_run, 0)
        if self.check_val_every_n_epoch is not None:
            _check_least("check_val_every_n_epoch", self.check_val_every_n_epoch, 1)
        elif isinstance(self.val_check_interval, float):
            raise UsageError(
                "check_val_every_n_epoch=None counts batches across epochs: val_check_interval must be a whole number of batches."
            )
        if self.gradient_clip_algorithm not in ("norm", "value"):
            raise UsageError(f"gradient_clip_algorithm={self.gradient_clip_algorithm!r}: it is 'norm' or 'value'.")
        clip = self.gradient_clip_val
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
            raise UsageError(f"gradient_clip_val={clip!r} must be a number above 0; None turns clipping off.")
        if self.seed is not None:
            _check_least("seed", self.seed, 0)
            if self.seed >= 2**32:
                raise UsageError(f"seed={self.seed!r} must be below 2**32, which is NumPy's range.")
        if self.deterministic not in (True, False, "warn"):
            raise UsageError(f"deterministic={self.deterministic!r}: it is True, False or 'warn'.")

    def limit(self, stage: str) -> int | float | None:
        """The limit on batches in a stage: a number, a fraction of the loader, or ``None``."""
        if stage == "sanity_check":
            steps = self.num_sanity_val_steps
            return None if steps == -1 else steps
        limits = {
            "train": self.limit_train_batches,
            "validate": self.limit_val_batches,
            "test": self.limit_test_batches,
            "predict": self.limit_predict_batches,
        }
        return limits[stage]


def _check_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r} must be a whole number, at least {least}.")


def _check_limit(name: str, value: Any, least: int = 0) -> None:
    if value is None:
        return
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise UsageError(f"{name}={value!r}: a fraction lies between 0.0 and 1.0; a number of batches is a whole number.")
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or (isinstance(value, int) and value < least):
        raise UsageError(f"{name}={value!r} must be a number of batches (at least {least}) or a fraction between 0.0 and 1.0.")


def refuse_unknown(unknown: dict[str, Any], known: list[str], accelerator: Any = None) -> None:
    """Answer each argument that Trainer does not have with the one to use.

    Args:
        accelerator: the one that is given with them.

    Raises:
        UsageError: there is one.
    """
    if not unknown:
        return
    answers = [
        f"Trainer has no argument {name!r}. {f'Write: {RENAMED[name]}' if name in RENAMED else nearest(name, known)}" for name in unknown
    ]
    if isinstance(accelerator, str) and accelerator in _WERE_ACCELERATORS:
        answers.append(f"accelerator={accelerator!r} is a strategy. Write: {_WERE_ACCELERATORS[accelerator]}")
    raise UsageError("\n".join(answers))


def refuse_unknown_of_fit(unknown: dict[str, Any]) -> None:
    """Answer an argument that ``Trainer.fit`` does not have with the one to use.

    Raises:
        UsageError: always, where there is one.
    """
    for name in unknown:
        raise UsageError(f"Trainer.fit has no argument {name!r}. {_OF_FIT.get(name) or nearest(name, _KNOWN_OF_FIT)}")


_KNOWN_OF_FIT = ("train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "checkpoint", "loss", "optimizer")
_OF_FIT = {
    "dataloaders": "Write: train_dataloaders=...",
    "weights_only": "Write: nothing: files are always read so",
}
