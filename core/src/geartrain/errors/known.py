"""Names that geartrain's distributions provide, for errors that end in a ``pip install`` line."""

from __future__ import annotations

_CALLBACKS = (
    *("accumulation_scheduler", "backbone_finetuning", "compile", "csv", "early_stopping", "ema"),
    *("lr_monitor", "manual_optimisation", "model_checkpoint", "model_summary", "nan_guard"),
    *("norms", "overfit", "overrides", "prediction_writer", "progress", "swa", "throughput"),
    "timer",
)
_COMMANDS = ("fit", "validate", "test", "predict", "explain", "plugins")
#: (kind, name) -> the distribution of ours that provides it. Other names get no install line.
KNOWN = {
    ("accelerator", "cuda"): "geartrain-cuda",
    ("accelerator", "mps"): "geartrain-mps",
    ("strategy", "dp"): "geartrain-dp",
    ("strategy", "ddp2"): "geartrain-dp",
    ("strategy", "ddp"): "geartrain-ddp",
    ("strategy", "ddp_spawn"): "geartrain-spawn",
    ("strategy", "spawn"): "geartrain-spawn",
    ("strategy", "horovod"): "geartrain-horovod",
    ("strategy", "bagua"): "geartrain-bagua",
    **{("plugin", name): "geartrain-callbacks" for name in _CALLBACKS},
    ("plugin", "device_stats"): "geartrain-monitor",
    ("plugin", "profile"): "geartrain-monitor",
    ("plugin", "sync_batchnorm"): "geartrain-parallel",
    ("plugin", "tensorboard"): "geartrain-tensorboard",
    ("plugin", "wandb"): "geartrain-wandb",
    ("plugin", "mlflow"): "geartrain-mlflow",
    **{("command", name): "geartrain-cli" for name in _COMMANDS},
    ("command", "conformance"): "geartrain-testing",
    ("command", "doctor"): "geartrain-tools",
    ("command", "new"): "geartrain-testing",
    ("command", "port"): "geartrain-port",
    ("command", "report"): "geartrain-tools",
    ("command", "tune"): "geartrain-tools",
}

#: All of geartrain's own distributions.
DISTRIBUTIONS = {"geartrain", "geartrain-parallel", "geartrain-session"}
DISTRIBUTIONS.update(KNOWN.values())

#: Hooks that geartrain's own distributions bring -> (kind, name) of the plugin.
HOOKS = {"reduce_bucket": ("strategy", "ddp")}

_LIGHTNINGS = (
    *("ddp_sharded", "ddp_sharded_spawn", "ddp_fully_sharded", "deepspeed", "fsdp", "tpu"),
    *("tpu_spawn", "xla", "colossalai"),
)
#: Lightning's names that no distribution provides.
NOT_SHIPPED = {("accelerator", name) for name in ("tpu", "hpu", "ipu", "xla")}
NOT_SHIPPED |= {("strategy", name) for name in _LIGHTNINGS}
