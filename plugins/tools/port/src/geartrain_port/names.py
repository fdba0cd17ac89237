"""Names of PyTorch Lightning and Bagua: geartrain's counterparts, and advice for other names.

The tables map a name to the text that follows "Write:". A text that starts with "nothing" means
that there is no counterpart.
"""

from __future__ import annotations

from geartrain.plugin_api import Registry

#: Lightning's packages, longest first. Names are looked up by their path after one of these.
ROOTS = (
    "lightning.pytorch",
    "lightning.fabric",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning",
    "geartrain",
    "bagua",
)

#: (first part of the path after the package, name) -> module and name in geartrain. A script may
#: also import the class from a deeper module.
TARGETS = {
    ("", "LightningModule"): "geartrain:Module",
    ("", "LightningDataModule"): "geartrain:DataModule",
    ("", "Module"): "geartrain:Module",  # in a file that was ported before
    ("", "DataModule"): "geartrain:DataModule",
    ("", "Trainer"): "geartrain:Trainer",
    ("", "seed_everything"): "geartrain:seed_everything",
    ("", "__version__"): "geartrain:__version__",
    ("", "Callback"): "geartrain.callbacks:Callback",
    ("", "Fabric"): "geartrain:Fabric",
    ("core", "LightningModule"): "geartrain:Module",
    ("core", "LightningDataModule"): "geartrain:DataModule",
    ("trainer", "Trainer"): "geartrain:Trainer",
    ("fabric", "Fabric"): "geartrain:Fabric",
    ("utilities", "seed_everything"): "geartrain:seed_everything",
    ("utilities", "CombinedLoader"): "geartrain:CombinedLoader",
    ("utilities", "grad_norm"): "geartrain.callbacks:grad_norm",
    ("trainer", "CombinedLoader"): "geartrain:CombinedLoader",
    ("accelerators", "find_usable_cuda_devices"): "geartrain.accelerators:find_usable_cuda_devices",
    ("callbacks", "Callback"): "geartrain.callbacks:Callback",
    **{
        ("callbacks", name): f"geartrain.callbacks:{name}"
        for name in (
            "BackboneFinetuning",
            "BaseFinetuning",
            "BasePredictionWriter",
            "DeviceStatsMonitor",
            "EMAWeightAveraging",
            "GradientAccumulationScheduler",
            "LambdaCallback",
            "ProgressBar",
            "RichProgressBar",
            "StochasticWeightAveraging",
            "TQDMProgressBar",
            "ThroughputMonitor",
            "WeightAveraging",
        )
    },
    ("callbacks", "EarlyStopping"): "geartrain.callbacks:EarlyStopping",
    ("callbacks", "EarlyStoppingReason"): "geartrain.callbacks:EarlyStoppingReason",
    ("callbacks", "ModelCheckpoint"): "geartrain.callbacks:ModelCheckpoint",
    ("callbacks", "LearningRateMonitor"): "geartrain.callbacks:LearningRateMonitor",
    ("callbacks", "ModelSummary"): "geartrain.callbacks:ModelSummary",
    ("callbacks", "RichModelSummary"): "geartrain.callbacks:ModelSummary",
    ("callbacks", "Timer"): "geartrain.callbacks:Timer",
    ("callbacks", "GPUStatsMonitor"): "geartrain.callbacks:DeviceStatsMonitor",
    ("loggers", "CSVLogger"): "geartrain.loggers:CSVLogger",
    ("loggers", "TensorBoardLogger"): "geartrain.loggers:TensorBoard",
    ("loggers", "WandbLogger"): "geartrain.loggers:WandB",
    ("loggers", "MLFlowLogger"): "geartrain.loggers:MLflow",
    ("strategies", "DDPStrategy"): "geartrain.strategies:DDPStrategy",
    ("strategies", "DDPSpawnStrategy"): "geartrain.strategies:DDPSpawnStrategy",
    ("strategies", "DDP2Strategy"): "geartrain.strategies:DDP2Strategy",
    ("strategies", "DataParallelStrategy"): "geartrain.strategies:DataParallelStrategy",
    ("strategies", "FSDPStrategy"): "geartrain.strategies:FSDPStrategy",
    ("strategies", "DeepSpeedStrategy"): "geartrain.strategies:DeepSpeedStrategy",
    ("strategies", "DDPShardedStrategy"): "geartrain.strategies:DDPShardedStrategy",
    ("strategies", "HorovodStrategy"): "geartrain.strategies:HorovodStrategy",
    ("strategies", "BaguaStrategy"): "geartrain.strategies:BaguaStrategy",
    ("bagua", "QAdamOptimizer"): "geartrain.strategies:QAdamOptimizer",
    ("cli", "LightningCLI"): "geartrain:cli",
    ("utilities", "LightningCLI"): "geartrain:cli",
    ("plugins", "DDPPlugin"): "geartrain.strategies:DDPStrategy",
    ("plugins", "DDPSpawnPlugin"): "geartrain.strategies:DDPSpawnStrategy",
    ("plugins", "DDP2Plugin"): "geartrain.strategies:DDP2Strategy",
}

#: Lightning's modules with a counterpart of the same name, for ``pl.callbacks.X`` and
#: ``from lightning.pytorch import callbacks``.
MODULES = ("accelerators", "callbacks", "loggers", "strategies")

_CLI = "gt.cli(MyModule, MyDataModule) as the script's last line"
#: Names or modules without a counterpart.
INSTEAD = {
    "rank_zero_only": "if self.global_rank == 0, or trainer.is_global_zero",
    "rank_zero_info": "self.print(...), or logging on trainer.is_global_zero",
    "rank_zero_warn": "warnings.warn on trainer.is_global_zero",
    "STEP_OUTPUT": "typing.Any, or torch.Tensor",
    "LightningCLI": _CLI,
    "MisconfigurationException": "geartrain.UsageError",
    "Tuner": "geartrain.tuning.Tuner, or the command geartrain tune",
    "LearningRateFinder": "geartrain tune lr",
    "BatchSizeFinder": "geartrain tune batch-size",
    "OnExceptionCheckpoint": "ModelCheckpoint(save_on_exception=True)",
    "metrics": "the package torchmetrics; with geartrain-callbacks, self.log takes its objects",
    "callbacks": "a subclass of geartrain.callbacks.Callback, see docs/callbacks.md",
    "loggers": "a plugin with a log_metrics hook, see docs/write-a-plugin.md",
    "strategies": "an installed strategy (geartrain plugins), or see docs/write-a-strategy.md",
    "profilers": "plugins=['profile'], or --profile on the command line",
    "profiler": "plugins=['profile'], or --profile on the command line",
    "tuner": "geartrain.tuning.Tuner, or the command geartrain tune",
    "cli": _CLI,
    **{
        f"{name}Algorithm": f'BaguaStrategy(algorithm="{algorithm}"), see docs/from-bagua.md'
        for name, algorithm in (
            ("GradientAllReduce", "gradient_allreduce"),
            ("ByteGrad", "bytegrad"),
            ("QAdam", "qadam"),
            ("Decentralized", "decentralized"),
            ("LowPrecisionDecentralized", "low_precision_decentralized"),
            ("AsyncModelAverage", "async"),
        )
    },
    "bagua": "a Trainer with strategy='bagua', see docs/from-bagua.md",
}

#: Members of Lightning's module that geartrain's does not have.
MEMBERS = {
    "freeze": "self.requires_grad_(False); self.eval()",
    "unfreeze": "self.requires_grad_(True); self.train()",
    "to_onnx": "torch.onnx.export(self, ...)",
    "to_torchscript": "torch.jit.script(self)",
    "to_tensorrt": "torch_tensorrt.compile(self, ...)",
    "on_gpu": "self.device.type == 'cuda'",
    "fabric": "nothing: a Trainer trains a module; your own loop uses gt.Session",
    "device_mesh": "nothing: no geartrain strategy shards a model",
    "strict_loading": "plugins=['partial_weights'], which loads the weights that fit",
    "hparams_initial": "self.hparams",
    "example_input_array": "",
    "dtype": "next(self.parameters()).dtype",
    "truncated_bptt_steps": "splitting the sequence in training_step",
    "use_amp": "self.trainer.precision",
    "model_size": "sum(p.numel() * p.element_size() for p in self.parameters())",
    "summarize": "plugins=['model_summary']",
    "get_progress_bar_dict": "self.log(..., prog_bar=True)",
    "add_to_queue": "nothing: metrics and weights come back from ddp_spawn by themselves",
    "get_from_queue": "nothing: metrics and weights come back from ddp_spawn by themselves",
}

#: Class methods of Lightning's classes.
OF_CLASSES = {
    "from_argparse_args": _CLI,
    "add_argparse_args": _CLI,
    "parse_argparser": _CLI,
    "from_datasets": "a subclass of gt.DataModule",
}

#: Members of Lightning's trainer that geartrain's does not have.
OF_TRAINER = {
    "fit_loop": "trainer.current_epoch, trainer.global_step and the batch_idx of the hook",
    "enable_validation": "limit_val_batches=0 turns validation off",
    "scaler": "nothing: precision='16-mixed' scales by itself",
    "precision_plugin": "nothing: trainer.precision is its name",
    "distributed_sampler_kwargs": "use_distributed_sampler=False, and your own sampler",
    "init_module": "nothing: a module is made on the CPU and moved once",
    "profiler": "the plugin 'profile', which writes profile.json and trace.json.gz",
}

#: Members of Lightning's Fabric that a Session does not have.
OF_FABRIC = {
    "accelerator": "fabric.plan.accelerator.name",
    "strategy": "fabric.plan.strategy.name",
    "init_tensor": "torch.tensor(..., device=fabric.device)",
    "init_module": "nothing: a module is made on the CPU, and setup moves it",
    "sharded_model": "nothing: no geartrain strategy shards a model",
    "load_raw": "model.load_state_dict(torch.load(FILE, weights_only=True))",
}

#: Members of Lightning's wrapper of an optimizer. No other library has methods with these names.
OF_OPTIMIZERS = {
    "toggle_model": (
        "with self.toggled_optimizer(optimizer): ..., or self.toggle_optimizer(optimizer)"
    ),
    "untoggle_model": (
        "with self.toggled_optimizer(optimizer): ..., or self.untoggle_optimizer(optimizer)"
    ),
}

#: Strategies of Lightning's registry -> geartrain's strategy and its options.
SPELT = {
    "deepspeed_stage_1": ("deepspeed", "{'stage': 1}"),
    "deepspeed_stage_2": ("deepspeed", "{'stage': 2}"),
    "deepspeed_stage_3": ("deepspeed", "{'stage': 3}"),
    "ddp_fork": ("ddp_spawn", "{'start_method': 'fork'}"),
    "ddp_notebook": ("ddp_spawn", "{'start_method': 'fork'}"),
    "ddp_find_unused_parameters_true": ("ddp", "{'find_unused_parameters': True}"),
    "ddp_find_unused_parameters_false": ("ddp", ""),
    "ddp_spawn_find_unused_parameters_true": ("ddp_spawn", "{'find_unused_parameters': True}"),
    "ddp_spawn_find_unused_parameters_false": ("ddp_spawn", ""),
    "ddp_notebook_find_unused_parameters_true": (
        "ddp_spawn",
        "{'start_method': 'fork', 'find_unused_parameters': True}",
    ),
    "ddp_notebook_find_unused_parameters_false": ("ddp_spawn", "{'start_method': 'fork'}"),
}

#: Arguments of Lightning's Trainer that geartrain's does not have.
OF_TRAINER_CALL = {
    "gpus": "devices=N with accelerator='gpu'; dp and ddp are strategies now: strategy='dp'",
    "num_gpus": "devices=N with accelerator='gpu'",
    "tpu_cores": "devices=N with accelerator='tpu', of geartrain-tpu",
    "num_processes": "devices=N with accelerator='cpu'",
    "distributed_backend": "strategy=NAME",
    "replace_sampler_ddp": "use_distributed_sampler=...",
    "auto_select_gpus": (
        "devices=find_usable_cuda_devices(k), or the cuda accelerator's auto_select option"
    ),
    "default_root_dir": "output=DIR",
    "enable_checkpointing": (
        "nothing: output=DIR writes last.ckpt, plugins=[ModelCheckpoint(...)] the best; "
        "without both nothing is written"
    ),
    "checkpoint_callback": "plugins=[ModelCheckpoint(...)] of geartrain.callbacks",
    "weights_save_path": "output=DIR",
    "logger": "plugins=[...], and output=DIR for metrics.jsonl",
    "progress_bar_refresh_rate": "enable_progress_bar=True or False",
    "auto_lr_find": "geartrain.tuning.Tuner(trainer).lr_find(model), or geartrain tune lr",
    "auto_scale_batch_size": (
        "geartrain.tuning.Tuner(trainer).scale_batch_size(model), or geartrain tune batch-size"
    ),
    "truncated_bptt_steps": "nothing: split the sequence in training_step",
    "resume_from_checkpoint": "ckpt_path=PATH of fit",
    "enable_model_summary": "plugins=['model_summary']; without it nothing is printed",
    "weights_summary": "plugins=['model_summary']; without it nothing is printed",
    "process_position": "nothing: there is one progress bar",
    "ipus": "nothing: no geartrain distribution drives IPUs",
    "log_gpu_memory": "plugins=['device_stats']",
    "track_grad_norm": "plugins=['norms']",
    "terminate_on_nan": "plugins=['nan_guard']",
    "flush_logs_every_n_steps": "log_every_n_steps=N",
    "benchmark": "accelerator_options={'cudnn_benchmark': True}",
    "profiler": "plugins=['profile'], or --profile on the command line",
    "barebones": "enable_progress_bar=False: nothing else is on by default",
    "enable_autolog_hparams": "nothing: every logger gets the hyperparameters",
    "model_registry": "nothing: upload the run's files yourself",
    "prepare_data_per_node": "nothing: prepare_data is called once per node",
    "amp_backend": "precision='16-mixed', which always uses torch's AMP",
    "amp_level": "precision='16-mixed', which always uses torch's AMP",
    "move_metrics_to_cpu": (
        "nothing: outputs of training_epoch_end are detached, and those of predict on the CPU"
    ),
    "multiple_trainloader_mode": "gt.CombinedLoader(loaders, mode) in place of the loaders",
    "stochastic_weight_avg": "plugins=['ema'], which averages exponentially",
}

#: Strategies that were accelerators in Lightning 1.4.
WERE_ACCELERATORS = {
    name: f"strategy={name!r}" for name in ("dp", "ddp", "ddp2", "ddp_spawn", "horovod")
} | {"ddp_cpu": "strategy='ddp' with accelerator='cpu'"}

#: Arguments of Lightning's ``Trainer.fit``.
OF_FIT = {
    "dataloaders": "train_dataloaders=...",
    "weights_only": "nothing: files are always read in this way",
}

#: Arguments of Lightning's ``load_from_checkpoint``; empty: leave it out.
OF_LOADING = {
    "weights_only": "",
    "hparams_file": "the file's hyperparameters as arguments, if the checkpoint lacks them",
}

#: Options of LightningCLI that are not Trainer's arguments.
OF_CLI = {
    "ckpt_path": "--checkpoint FILE for its weights, or fit --resume FILE to continue the run",
    "seed_everything": "--seed",
    "callbacks": "--plugin NAME_OR_FILE for a callback that is a plugin; callbacks are objects",
}

_KERAS = [
    f"on_{stage}{what}_{end}"
    for stage in ("train", "test", "predict")
    for what in ("", "_batch")
    for end in ("begin", "end")
]
#: Methods of callbacks of Keras and of transformers' Trainer -> the class that has them.
OF_OTHERS = {
    **dict.fromkeys(
        [*_KERAS, "on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end"],
        "a callback of Keras",
    ),
    **dict.fromkeys(
        [
            "on_step_begin",
            "on_pre_optimizer_step",
            "on_optimizer_step",
            "on_substep_end",
            "on_evaluate",
            "on_predict",
            "on_save",
            "on_log",
            "on_prediction_step",
            "on_push_begin",
            "on_init_end",
        ],
        "a TrainerCallback of transformers",
    ),
}

#: Methods of Lightning's module that geartrain never calls.
NOT_CALLED = {
    "clip_gradients": "configure_gradient_clipping",
    "configure_sharded_model": "__init__",
    "configure_model": "__init__",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
    "on_test_dataloader": "test_dataloader",
    "on_predict_dataloader": "predict_dataloader",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_post_move_to_device": "on_fit_start, or tensors that share one Parameter from __init__ on",
    "on_validation_model_zero_grad": "on_validation_start",
    "on_validation_model_eval": "on_validation_start",
    "on_validation_model_train": "on_validation_end",
    "on_test_model_eval": "on_test_start",
    "on_test_model_train": "on_test_end",
    "on_predict_model_eval": "on_predict_start",
    "on_predict_model_train": "on_predict_end",
    "log_grad_norm": "Trainer(plugins=['norms'])",
    "tbptt_split_batch": "splitting the sequence in training_step",
    "predict_step_end": "predict_step",
    "predict_epoch_end": "the return value of Trainer.predict",
}

#: Methods of Lightning's data module that geartrain never calls.
NOT_CALLED_OF_DATA = {
    "transfer_batch_to_device": "the same method of the module",
    "on_before_batch_transfer": "the same method of the module",
    "on_after_batch_transfer": "the same method of the module",
    "on_save_checkpoint": "state_dict of the data module",
    "on_load_checkpoint": "load_state_dict of the data module",
    "on_exception": "on_exception of a callback",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
    "on_test_dataloader": "test_dataloader",
    "on_predict_dataloader": "predict_dataloader",
}

#: Names of Lightning's that no distribution provides.
NOT_SHIPPED = {
    "accelerator": ("tpu", "hpu", "ipu", "xla"),
    "strategy": (
        *("ddp_sharded_spawn", "ddp_fully_sharded", "tpu"),
        *("tpu_spawn", "xla", "colossalai"),
    ),
}

#: Arguments that Lightning gives a module's method, or gave it once -> the fix.
NOT_GIVEN = {
    "optimizer_idx": "set automatic_optimization = False in __init__, and self.optimizers() in "
    "training_step, see docs/manual-optimisation.md",
    "hiddens": "split the sequence in training_step",
    "dataloader_iter": "use a batch: def {name}(self, batch, batch_idx)",
}

_BY_OWNER = {
    "method": OF_OTHERS,
    "Module": MEMBERS,
    "method of Module": NOT_CALLED,
    "method of DataModule": NOT_CALLED_OF_DATA,
    "Trainer": OF_TRAINER,
    "Session": OF_FABRIC,
    "Trainer()": OF_TRAINER_CALL,
    "Trainer.fit()": OF_FIT,
    "option": OF_TRAINER_CALL | OF_CLI,
    "accelerator": WERE_ACCELERATORS,
}

#: Arguments of Lightning's self.log that geartrain's does not have.
LOG = {
    "enable_graph": "nothing: a logged tensor is detached",
    "sync_dist_group": "nothing: sync_dist=True reduces over all ranks",
    "metric_attribute": "nothing: self.log finds the metric object",
}


def tail(qualified: str) -> str | None:
    """Return the path after Lightning's package in a qualified name; ``None`` for other names.

    A name of Bagua's or of Fabric's keeps ``bagua`` or ``fabric`` as its first part.
    """
    for root in ROOTS:
        if qualified == root or qualified.startswith(f"{root}."):
            kept = next((name for name in ("fabric", "bagua") if root.endswith(name)), "")
            return f"{kept}{qualified[len(root) :]}".lstrip(".")
    return None


def key(path: str) -> tuple[str, str]:
    """Return the first part and the last of a path after the package.

    ``callbacks.early_stopping.EarlyStopping`` is ``("callbacks", "EarlyStopping")``.
    """
    first, _, others = path.removeprefix("fabric.").partition(".")
    return ("", first) if not others else (first, others.rpartition(".")[2])


def target(path: str) -> tuple[str, str] | None:
    """Return geartrain's module and name for a path after the package, or ``None``."""
    found = TARGETS.get(key(path))
    return (found.partition(":")[0], found.partition(":")[2]) if found else None


def hint(owner: str, name: str) -> str:
    """Return the text to write for a name of Lightning's; the empty string for other names.

    For a method of another framework's callbacks, return the class that has it. This is an entry
    point of ``geartrain.hints``.

    Args:
        owner: the object without the name: ``"Trainer"``, ``"option"``, ``"geartrain.callbacks"``.
        name: the name that a user wrote.
    """
    if owner.partition(".")[0] == "geartrain":
        return _counterpart(f"{owner.partition('.')[2]}.{name}".lstrip("."))
    if name in NOT_SHIPPED.get(owner, ()):
        installed = ", ".join(plugin.name for plugin in Registry().of(owner))
        return f"use {installed}; no geartrain distribution provides it"
    if owner.startswith("argument of "):
        return NOT_GIVEN.get(name, "").format(name=owner.removeprefix("argument of "))
    if owner == "strategy" and name in SPELT:
        new, options = SPELT[name]
        return f"strategy={new!r}" + (f" with strategy_options={options}" if options else "")
    return _BY_OWNER.get(owner, {}).get(name, "")


def _counterpart(path: str) -> str:
    found, (group, name) = target(path), key(path)
    if found is None:
        return INSTEAD[name] if name in INSTEAD and name not in MODULES else ""
    same = (found[0].partition(".")[2], found[1]) == (group, name)
    return "" if same else f"{found[0]}.{found[1]}"


def instead(path: str) -> str:
    """Return the text to write for a name without a counterpart."""
    group, name = key(path)
    unknown = "nothing of this name: see docs/from-lightning.md"
    return INSTEAD.get(name) or INSTEAD.get(group) or unknown
